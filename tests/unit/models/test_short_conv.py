"""The short convolution continues sequences from their states, in any cut, next to others and next to padding.

Legend: T token, X channel, W tap, S slot, H head, C channel of a head.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from baton.models.kernels.recurrent.short_conv import short_conv as in_triton
from baton.models.kernels.recurrent.state_rows import StateRows, continuing
from baton.models.layers.recurrent.short_conv import short_conv_in_torch
from tests.device import DEVICE

SLOTS, HEADS, CHANNELS = 7, 3, 40
Twin = Literal["torch", "triton"]
by_twin = pytest.mark.parametrize("twin", ["torch", "triton"])


def numbers(*sizes: int, seed: int) -> Tensor:
    drawn: Tensor = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return drawn


def states(width: int) -> Tensor:
    """Other channels lie between those of the heads; stale numbers are in all of them."""
    wide = torch.full((SLOTS, HEADS, CHANNELS * (width - 1) + 9), torch.nan, device=DEVICE)
    return torch.unflatten(wide[..., 4:-5], -1, (CHANNELS, width - 1))


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_of(
    decodes: list[tuple[int, int]],
    prompts: list[tuple[int, int, int]],
    *,
    num_decodes: int | None = None,
    snapshots: list[list[tuple[int, int]]] | None = None,
) -> StateRows:
    """Decodes as (slot, length), prompts as (slot, new tokens, context), each with two snapshots as (slot, tokens)."""
    starts = [num_decodes if num_decodes is not None else len(decodes)]
    for _, tokens, _ in prompts:
        starts.append(starts[-1] + tokens)
    slots, lens = [slot for slot, _ in decodes], [length for _, length in decodes]
    contexts = [context for *_, context in prompts]
    most = max([tokens for _, tokens, _ in prompts], default=0)
    kept = torch.tensor(snapshots or [[(-1, 0), (-1, 0)]] * len(prompts), dtype=torch.int32, device=DEVICE)
    kept_slots, kept_lens = kept.reshape(-1, 2, 2).unbind(-1)
    return StateRows(
        ints(slots),
        ints(lens),
        ints([slot for slot, *_ in prompts]),
        ints(starts),
        ints(contexts),
        kept_slots.contiguous(),
        kept_lens.contiguous(),
        most,
    )


def convolve(
    twin: Twin, x_TX: Tensor, weight_XW: Tensor, bias_X: Tensor | None, state: Tensor, rows: StateRows, *, act: bool
) -> Tensor:
    heads_THC = x_TX.unflatten(-1, (HEADS, CHANNELS))
    # As a layer has it: a part of wider heads.
    x_THC = torch.cat((heads_THC, torch.full_like(heads_THC, torch.nan)), dim=-1)[..., :CHANNELS]
    if twin == "torch":
        return short_conv_in_torch(x_THC, weight_XW, bias_X, state, rows, activation="silu" if act else None)
    return in_triton(x_THC, weight_XW, bias_X, state, rows, silu=act)


def expected(x_TX: Tensor, weight_XW: Tensor, bias_X: Tensor | None, *, act: bool) -> Tensor:
    """Of a whole sequence."""
    width = weight_XW.shape[1]
    out_XT = conv1d(
        x_TX.float().t(),
        weight_XW.float()[:, None],
        None if bias_X is None else bias_X.float(),
        padding=width - 1,
        groups=len(weight_XW),
    )[:, : len(x_TX)]
    return (silu(out_XT) if act else out_XT).t().to(x_TX.dtype)


@by_twin
@pytest.mark.parametrize(("width", "bias", "act"), [(3, False, False), (4, True, True), (2, True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sequences_in_chunks_equal_the_whole_convolution(
    twin: Twin, width: int, bias: bool, act: bool, dtype: torch.dtype
) -> None:
    size = HEADS * CHANNELS
    weight_XW = numbers(size, width, seed=1).to(dtype)
    bias_X = numbers(size, seed=2).to(dtype) if bias else None
    first, second = (numbers(60, size + 8, seed=seed).to(dtype)[:, 3 : size + 3] for seed in (3, 4))
    state = states(width)
    ours: dict[int, list[Tensor]] = {0: [], 1: []}

    def step(decodes: list[tuple[int, int, int]], prompts: list[tuple[int, int, int]]) -> None:
        """(which sequence, start, stop) each."""
        parts = [(first, second)[which][start:stop] for which, start, stop in [*decodes, *prompts]]
        rows = rows_of(
            [(5 - which, stop) for which, _, stop in decodes],
            [(5 - which, stop - start, start) for which, start, stop in prompts],
        )
        out = convolve(twin, torch.cat(parts), weight_XW, bias_X, state, rows, act=act)
        for (which, *_), piece in zip([*decodes, *prompts], out.split([len(part) for part in parts]), strict=True):
            ours[which].append(piece)

    step([], [(0, 0, 37), (1, 0, 2)])
    step([(0, 37, 38)], [(1, 2, 3)])
    step([(1, 3, 4), (0, 38, 39)], [])
    step([(1, 4, 5)], [(0, 39, 60)])
    step([], [(1, 5, 60)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for which, x_TX in enumerate((first, second)):
        whole = expected(x_TX, weight_XW, bias_X, act=act)
        torch.testing.assert_close(torch.cat(ours[which]), whole, rtol=tolerance, atol=tolerance)
        last = x_TX[60 - (width - 1) :].float().t()
        torch.testing.assert_close(state[5 - which].reshape(size, width - 1), last, rtol=0, atol=0)


@by_twin
def test_any_cut_has_the_same_bits(twin: Twin) -> None:
    x_TX, weight_XW = numbers(50, HEADS * CHANNELS, seed=5), numbers(HEADS * CHANNELS, 4, seed=6)

    def computed(*cuts: int) -> Tensor:
        state = states(4)
        parts = []
        for start, stop in pairwise((0, *cuts, 50)):
            rows = rows_of([], [(2, stop - start, start)]) if stop - start > 1 else rows_of([(2, stop)], [])
            parts.append(convolve(twin, x_TX[start:stop], weight_XW, None, state, rows, act=False))
        return torch.cat(parts)

    assert torch.equal(computed(), computed(1, 2, 3, 20, 21, 49))


@by_twin
def test_snapshots_within_prompts_hold_the_inputs_before_them(twin: Twin) -> None:
    """Some of them are of the tokens before the step, or of none before a prompt's first one."""
    size = HEADS * CHANNELS
    x_TX, weight_XW, state = numbers(30, size, seed=5), numbers(size, 4, seed=6), states(4)
    convolve(twin, x_TX[:10], weight_XW, None, state, rows_of([], [(2, 10, 0)]), act=False)
    rows = rows_of([], [(2, 5, 10), (3, 15, 0)], snapshots=[[(4, 1), (5, 4)], [(6, 9), (0, 2)]])
    convolve(twin, x_TX[10:], weight_XW, None, state, rows, act=False)
    none = torch.zeros(1, size, device=DEVICE)
    of_second = x_TX[15:]
    expected = {
        4: x_TX[8:11],
        5: x_TX[11:14],
        6: of_second[6:9],
        0: torch.cat([none, of_second[:2]]),
        2: x_TX[12:15],
        3: of_second[12:],
    }
    for slot, last in expected.items():
        assert torch.equal(state[slot].reshape(size, 3), last.t()), slot
    assert state[1].isnan().all()


@by_twin
def test_rows_of_padding_read_and_write_nothing(twin: Twin) -> None:
    size = HEADS * CHANNELS
    x_TX, weight_XW, state = numbers(12, size, seed=7), numbers(size, 3, seed=8), states(3)
    untouched = state.clone()
    # Token 1 belongs to the prompt, though there is room for four decodes.
    rows = rows_of([(4, 1), (-1, 0), (-1, 0), (-1, 0)], [(0, 5, 0), (-1, 0, 0)], num_decodes=1)
    out = convolve(twin, x_TX, weight_XW, None, state, rows, act=False)
    assert out[6:].isfinite().all()
    torch.testing.assert_close(out[:1], expected(x_TX[:1], weight_XW, None, act=False), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[1:6], expected(x_TX[1:6], weight_XW, None, act=False), rtol=1e-5, atol=1e-5)
    for slot in {*range(SLOTS)} - {0, 4}:
        assert torch.equal(state[slot].nan_to_num(), untouched[slot].nan_to_num())
    assert state[0].isfinite().all()
    assert state[4].isfinite().all()


def test_only_padding_gets_zeros_in_a_step_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row continues the first one, whose program computes it."""
    rows = replace(rows_of([(1, 5), (-1, 9), (continuing(3), 6)], []), decode_next_N=ints([2, -1, -1]))
    size = HEADS * CHANNELS
    operands = numbers(3, size, seed=1), numbers(size, 4, seed=2), None, states(4).zero_(), rows
    monkeypatch.setattr(torch, "empty", partial(torch.full, fill_value=torch.nan))
    out = convolve("triton", *operands, act=False)
    assert not out[1].any()
    assert out[[0, 2]].isfinite().all()
    assert out[[0, 2]].abs().min() > 0


@by_twin
def test_a_step_of_padding_alone_changes_nothing(twin: Twin) -> None:
    size = HEADS * CHANNELS
    state = states(3)
    state[:] = 1.0
    rows = rows_of([(-1, 0), (-1, 0)], [(-1, 0, 0)], num_decodes=0)
    convolve(twin, numbers(4, size, seed=9), numbers(size, 3, seed=10), None, state, rows, act=True)
    assert bool((state == 1.0).all())
