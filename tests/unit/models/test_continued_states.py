"""Decodes that continue the states of others in the same step have the bits of decodes in steps of their own, and leave
the state after each token in a slot of its own.

Legend: T token, S slot, X channel, W tap, H head, C channel of a head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from baton.models.kernels.recurrent import gated_delta as delta_kernels
from baton.models.kernels.recurrent.shared_inputs import share_inputs
from baton.models.kernels.recurrent.short_conv import short_conv
from baton.models.kernels.recurrent.state_rows import StateRows, continuing
from baton.models.layers.recurrent import gated_delta as delta
from baton.models.layers.recurrent.selective_scan import share_inputs_in_torch
from baton.models.layers.recurrent.short_conv import short_conv_in_torch
from tests.device import DEVICE
from tests.unit.models import test_gated_delta, test_selective_scan
from tests.unit.models.recurrent_steps import state_rows

SLOTS, TOKENS, WIDTH = 9, 7, 4
# From the places of the step's tokens, all slots' states, and the step's rows to outputs.
Rule: TypeAlias = Callable[[list[int], Tensor, StateRows], Tensor]


def numbers(*sizes: int, seed: int) -> Tensor:
    drawn: Tensor = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return drawn


def convolution(twin: str) -> tuple[Rule, Tensor]:
    heads, channels = 2, 150
    x_TX, weight_XW = numbers(TOKENS, heads * channels, seed=1), numbers(heads * channels, WIDTH, seed=2)

    def convolve(places: list[int], state_SHCW: Tensor, rows: StateRows) -> Tensor:
        x_THC = x_TX[places].unflatten(-1, (heads, channels))
        if twin == "torch":
            return short_conv_in_torch(x_THC, weight_XW, None, state_SHCW, rows, activation="silu")
        return short_conv(x_THC, weight_XW, None, state_SHCW, rows, silu=True)

    return convolve, numbers(SLOTS, heads, channels, WIDTH - 1, seed=3)


def scan(twin: str) -> tuple[Rule, Tensor]:
    tokens, weights = test_selective_scan.sequence(TOKENS, 4), test_selective_scan.weights()
    x, dt, b, c = tokens.x_THP, tokens.dt_TH, tokens.b_TGN, tokens.c_TGN
    sizes = test_selective_scan.HEADS, test_selective_scan.CHANNELS, test_selective_scan.NUMBERS

    def scanned(places: list[int], states: Tensor, rows: StateRows) -> Tensor:
        here = test_selective_scan.Sequence(x[places], dt[places], b[places], c[places])
        return test_selective_scan.scan(twin, here, weights, states, rows)

    return scanned, numbers(SLOTS, *sizes, seed=5)


def delta_rule(twin: str, *, by_channel: bool = False) -> tuple[Rule, Tensor]:
    tokens = test_gated_delta.tokens_of(TOKENS, by_channel=by_channel).on_device()
    computed = delta.in_torch if twin == "torch" else delta_kernels.gated_delta
    sizes = (test_gated_delta.HEADS, test_gated_delta.PER_HEAD, test_gated_delta.KEYS, test_gated_delta.VALUES)

    def corrected(places: list[int], states: Tensor, rows: StateRows) -> Tensor:
        q, k, v, log_decay, beta = (each[places] for each in tokens.all)
        return computed(q, k, v, log_decay, beta, states, rows)

    return corrected, numbers(SLOTS, *sizes, seed=6)


RULES: dict[str, Callable[[str], tuple[Rule, Tensor]]] = {
    "convolution": convolution,
    "scan": scan,
    "delta rule": delta_rule,
    "delta rule by channel": lambda twin: delta_rule(twin, by_channel=True),
}


@pytest.mark.parametrize("twin", ["torch", "triton"])
@pytest.mark.parametrize("rule", RULES)
def test_continued_decodes_have_the_bits_of_steps_of_their_own(rule: str, twin: str) -> None:
    """One request begins and goes on with two tokens, one has a token alone, and one goes on with one token."""
    compute, before = RULES[rule](twin)
    # Places of a request's tokens, slots of the states after them, and tokens before the first one.
    requests = (([0, 3, 4], [2, 7, 5], 0), ([1], [8], 9), ([2, 5], [0, 3], 30))
    slots, lens, following = [-1] * 6, [0] * 6, [-1] * 6
    for places, after, context in requests:
        for index, (place, slot) in enumerate(zip(places, after, strict=True)):
            slots[place] = continuing(slot) if index else slot
            lens[place] = context + index + 1
            following[place] = [*places, -1][index + 1]
    rows = state_rows(slots, [1] * 6, [length - 1 for length in lens], device=DEVICE)
    next_N = torch.tensor([*following, -1, -1], dtype=torch.int32, device=DEVICE)  # two rows are padding
    ours = before.clone()
    out = compute(list(range(6)), ours, replace(rows, decode_next_N=next_N))
    untouched = [slot for slot in range(SLOTS) if slot not in (2, 7, 5, 8, 0, 3)]
    assert torch.equal(ours[untouched], before[untouched])
    for places, after, context in requests:
        states, slot = before.clone(), after[0]
        for index, place in enumerate(places):
            alone = compute([place], states, state_rows([slot], [1], [context + index], device=DEVICE))
            assert torch.equal(out[place], alone[0]), (places, index)
            assert torch.equal(ours[after[index]], states[slot]), (places, index)


@pytest.mark.parametrize("twin", ["torch", "triton"])
def test_continued_decodes_share_the_inputs_of_their_group(twin: str) -> None:
    conv_SHXW = numbers(SLOTS, 4, 40, 3, seed=7)
    before = conv_SHXW.clone()
    rows = state_rows([1, continuing(6)], [1, 1], [8, 9], device=DEVICE)
    rows = replace(rows, decode_next_N=torch.tensor([1, -1, -1, -1], dtype=torch.int32, device=DEVICE))
    share = share_inputs_in_torch if twin == "torch" else share_inputs
    share(conv_SHXW, rows, num_groups=2)
    shared = before[:, ::2].repeat_interleave(2, dim=1)
    for slot in range(SLOTS):
        assert torch.equal(conv_SHXW[slot], (shared if slot in (1, 6) else before)[slot])
