"""The gated delta rule: its sub-chunks equal the rule token by token, and its kernels equal both.

Legend: T token, S slot, H key head, R value head of a key head, K key channel, V value channel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.models.kernels.recurrent import delta_gates
from baton.models.kernels.recurrent import gated_delta as kernels
from baton.models.kernels.recurrent.gated_delta_systems import CHUNK
from baton.models.kernels.recurrent.gated_norm import gated_norm
from baton.models.kernels.recurrent.state_rows import StateRows, continuing
from baton.models.layers.recurrent.delta_gates import correction_rates, log_decays
from baton.models.layers.recurrent.gated_delta import gated_delta, in_torch, sub_chunks, unit
from baton.models.layers.recurrent.gated_norm import GatedRMSNorm
from tests.device import DEVICE
from tests.unit.models.recurrent_steps import state_rows

HEADS, PER_HEAD, KEYS, VALUES = 2, 3, 12, 20
SLOTS = 5
Rule = Callable[..., Tensor]
by_rule = pytest.mark.parametrize("rule", [in_torch, kernels.gated_delta], ids=["torch", "triton"])
by_decay = pytest.mark.parametrize("by_channel", [False, True], ids=["one-decay", "decays-by-channel"])


@dataclass(frozen=True)
class Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    def at(self, tokens: slice) -> "Tokens":
        return Tokens(*(each[tokens] for each in self.all))

    def on_device(self) -> "Tokens":
        return Tokens(*(each.to(DEVICE) for each in self.all))

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.log_decay, self.beta


def tokens_of(count: int, *, by_channel: bool, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tokens:
    """Queries, keys and values are parts of one tensor. Some decays are strong, some weak."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, HEADS, 2 * KEYS + PER_HEAD * VALUES, generator=generator).to(dtype)
    q, k, v = mixed.split([KEYS, KEYS, PER_HEAD * VALUES], dim=-1)
    shape = (count, HEADS, PER_HEAD, *([KEYS] if by_channel else []))
    log_decay = -torch.empty(shape).exponential_(generator=generator) * torch.logspace(-3, 0.5, PER_HEAD).view(
        -1, *([1] if by_channel else [])
    )
    beta = torch.rand(count, HEADS, PER_HEAD, generator=generator)
    return Tokens(q, k, v.unflatten(-1, (PER_HEAD, VALUES)), log_decay, beta)


def states(seed: int = 0) -> Tensor:
    """[S, H, R, K, V], parts of larger heads."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(SLOTS, HEADS, 7 + PER_HEAD * KEYS * VALUES, generator=generator)
    return torch.unflatten(wide[..., 7:], -1, (PER_HEAD, KEYS, VALUES))


def token_by_token(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """In float64."""
    q, k, v, log_decay, beta = (each.double() for each in tokens.all)
    q, k, state = unit(q) * KEYS**-0.5, unit(k), state.double()
    out = torch.empty_like(v)
    for token in range(len(v)):
        fade = log_decay[token].exp()
        state = state * (fade.unsqueeze(-1) if fade.dim() == 3 else fade[..., None, None])
        key = k[token, :, None, :, None]
        delta = (v[token] - (state * key).sum(-2)) * beta[token].unsqueeze(-1)
        state = state + key * delta.unsqueeze(-2)
        out[token] = (state * q[token, :, None, :, None]).sum(-2)
    return out, state


def in_cuts(rule: Rule, tokens: Tokens, cuts: Sequence[int], kept: Tensor, slot: int = 2) -> Tensor:
    parts = []
    for start, stop in pairwise(cuts):
        rows = on_device(state_rows([slot], [stop - start], [start], decodes=0))
        parts.append(rule(*tokens.at(slice(start, stop)).all, kept, rows))
    return torch.cat(parts)


@by_decay
@pytest.mark.parametrize("context", [0, 37])
def test_sub_chunks_equal_the_rule_token_by_token(by_channel: bool, context: int) -> None:
    tokens, kept = tokens_of(150, by_channel=by_channel), states()
    expected, state = token_by_token(tokens, kept[2] if context else torch.zeros_like(kept[2]))
    out = gated_delta(*tokens.all, kept, state_rows([2], [150], [context]))
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kept[2].double(), state, rtol=1e-4, atol=1e-5)


@by_decay
@by_rule
def test_cuts_at_multiples_of_a_sub_chunk_change_no_bit_and_others_only_rounding(by_channel: bool, rule: Rule) -> None:
    tokens = tokens_of(200, by_channel=by_channel).on_device()
    whole, even, odd = (states().to(DEVICE) for _ in range(3))
    expected = in_cuts(rule, tokens, [0, 200], whole)
    assert torch.equal(in_cuts(rule, tokens, [0, CHUNK, 3 * CHUNK, 200], even), expected)
    assert torch.equal(even, whole)
    torch.testing.assert_close(in_cuts(rule, tokens, [0, 1, 50, CHUNK, 100, 200], odd), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(odd, whole, rtol=1e-4, atol=1e-5)


def test_sub_chunks_end_at_multiples_of_their_size_in_the_whole_prompt() -> None:
    pieces = list(sub_chunks(10, 10 + 200, context=100))
    assert [(piece.start, piece.stop) for piece in pieces] == [(10, 38), (38, 102), (102, 166), (166, 210)]


@by_decay
def test_decodes_equal_the_rule_and_touch_no_other_slot(by_channel: bool) -> None:
    tokens, kept = tokens_of(5, by_channel=by_channel), states()
    kept[3] = torch.nan  # that of the decode whose sequence begins, and of no other
    before = kept.clone()
    rows = state_rows([1, 3], [1, 1], [40, 0])
    out = gated_delta(*tokens.all, kept, rows)
    for row, (slot, initial) in enumerate(((1, before[1]), (3, torch.zeros_like(before[3])))):
        expected, state = token_by_token(tokens.at(slice(row, row + 1)), initial)
        torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(kept[slot].double(), state, rtol=1e-4, atol=1e-5)
    assert torch.equal(kept[[0, 2, 4]], before[[0, 2, 4]])


def test_a_step_of_padding_alone_changes_nothing() -> None:
    kept = states()
    before = kept.clone()
    gated_delta(*tokens_of(2, by_channel=False).all, kept, state_rows([], [], []))
    gated_delta(*tokens_of(2, by_channel=False).all, kept, state_rows([-1, -1], [1, 1], [6, 0]))  # as captures have it
    assert torch.equal(kept, before)


def test_only_padding_gets_zeros_in_a_step_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row continues the first one, whose program computes it."""
    monkeypatch.setattr(torch, "empty_like", partial(torch.full_like, fill_value=torch.nan))
    rows = replace(
        state_rows([1, -1], [1, 1], [4, 9]),
        decode_slots_N=torch.tensor([1, -1, continuing(3)], dtype=torch.int32),
        decode_lens_N=torch.tensor([5, 9, 6], dtype=torch.int32),
        decode_next_N=torch.tensor([2, -1, -1], dtype=torch.int32),
    )
    q, k, v, log_decay, beta = (each.to(DEVICE) for each in tokens_of(3, by_channel=False).all)
    out = kernels.gated_delta(q, k, v, log_decay, beta, states().to(DEVICE), on_device(rows))
    assert not out[1].any()
    assert out[[0, 2]].isfinite().all()
    assert out[[0, 2]].abs().min() > 0


def on_device(rows: StateRows) -> StateRows:
    return StateRows(
        decode_slots_N=rows.decode_slots_N.to(DEVICE),
        decode_lens_N=rows.decode_lens_N.to(DEVICE),
        prompt_slots_P=rows.prompt_slots_P.to(DEVICE),
        prompt_starts_P1=rows.prompt_starts_P1.to(DEVICE),
        prompt_context_P=rows.prompt_context_P.to(DEVICE),
        snapshot_slots_PM=rows.snapshot_slots_PM.to(DEVICE),
        snapshot_lens_PM=rows.snapshot_lens_PM.to(DEVICE),
        max_prompt_tokens=rows.max_prompt_tokens,
        decode_next_N=None if rows.decode_next_N is None else rows.decode_next_N.to(DEVICE),
    )


@pytest.mark.parametrize(
    ("by_channel", "dtype"),
    [(False, torch.float32), (False, torch.bfloat16), (True, torch.float32)],
    ids=["one-decay", "one-decay-bfloat16", "decays-by-channel"],
)
def test_kernels_equal_their_twin(by_channel: bool, dtype: torch.dtype) -> None:
    """Two decodes, a prompt with a context, one that begins, and padding."""
    lens, contexts = [1, 1, 30, 3], [64, 0, 45, 0]
    tokens, kept = tokens_of(sum(lens), by_channel=by_channel, dtype=dtype), states()
    kept[3] = torch.nan
    rows, ours = state_rows([1, 3, 0, 4], lens, contexts), kept.clone().to(DEVICE)
    expected = in_torch(*tokens.all, kept, rows)
    out = kernels.gated_delta(*tokens.on_device().all, ours, on_device(rows))
    assert out.dtype is dtype
    tolerance = 1e-4 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance / 10)
    # The products of models in 16 bits are in tf32 where the kernel is compiled.
    tolerance = 1e-4 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(ours.cpu(), kept, rtol=tolerance, atol=1e-5 if dtype is torch.float32 else tolerance)


@by_decay
@pytest.mark.parametrize("decays", ["none", "one-in-a-sub-chunk", "all", "some"])
def test_kernels_equal_the_rule_token_by_token_for_any_decay(by_channel: bool, decays: str) -> None:
    """Two prompts whose sub-chunks have all tokens or some. Strong decays leave nothing: one more
    factor of exp(10,000) would be infinite, and a sum with it would have no digits of a weak one."""
    lengths, contexts = [100, 2], [37, CHUNK - 1]
    tokens = tokens_of(sum(lengths), by_channel=by_channel)
    index_T = torch.arange(sum(lengths)).view(-1, *[1] * (tokens.log_decay.dim() - 1))
    log_decay = {
        "none": torch.zeros_like(tokens.log_decay),
        "one-in-a-sub-chunk": torch.where(index_T % CHUNK == 7, -1e4, tokens.log_decay),
        "all": torch.full_like(tokens.log_decay, -1e4),
        "some": torch.where(tokens.log_decay < -1, -1e4, tokens.log_decay),
    }[decays]
    tokens = replace(tokens, log_decay=log_decay)
    before = states()
    kept = before.clone().to(DEVICE)
    rows = on_device(state_rows([1, 3], lengths, contexts, decodes=0))
    outs = kernels.gated_delta(*tokens.on_device().all, kept, rows).cpu().split(lengths)
    start = 0
    for slot, length, context, out in zip((1, 3), lengths, contexts, outs, strict=True):
        initial = before[slot] if context else torch.zeros_like(before[slot])
        expected, state = token_by_token(tokens.at(slice(start, start + length)), initial)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(kept[slot].double().cpu(), state, rtol=1e-4, atol=1e-4)
        start += length


@by_decay
@pytest.mark.parametrize("power", [-60, 60])
def test_values_of_any_size_have_the_same_digits(by_channel: bool, power: int) -> None:
    """Prompts are computed with numbers in float16, which are 0 below 2 ** -24 and infinite from 2 ** 16 on."""
    tokens = tokens_of(100, by_channel=by_channel, dtype=torch.bfloat16).on_device()
    larger = replace(tokens, v=tokens.v * 2.0**power)
    ours, theirs = states().to(DEVICE), states().to(DEVICE) * 2.0**power
    rows = on_device(state_rows([2], [100], [37], decodes=0))
    out, expected = kernels.gated_delta(*larger.all, theirs, rows), kernels.gated_delta(*tokens.all, ours, rows)
    assert torch.equal(out, expected * 2.0**power)
    assert torch.equal(theirs[2], ours[2] * 2.0**power)


@by_decay
@by_rule
def test_a_request_has_the_same_bits_alone_and_next_to_others(by_channel: bool, rule: Rule) -> None:
    """Two decodes and two prompts, in one step and in four."""
    lengths, contexts = [1, 1, 30, 3], [64, 7, 45, 0]
    tokens = tokens_of(sum(lengths), by_channel=by_channel).on_device()
    together = states().to(DEVICE)
    apart = together.clone()
    outs = rule(*tokens.all, together, on_device(state_rows(range(4), lengths, contexts))).split(lengths)
    start = 0
    for slot, (length, context, out) in enumerate(zip(lengths, contexts, outs, strict=True)):
        own = tokens.at(slice(start, start + length))
        assert torch.equal(rule(*own.all, apart, on_device(state_rows([slot], [length], [context]))), out)
        assert torch.equal(apart[slot], together[slot])
        start += length


@by_decay
@pytest.mark.parametrize("rule", [in_torch, kernels.gated_delta], ids=["torch", "triton"])
def test_snapshots_within_prompts_have_the_bits_of_prompts_that_end_there(by_channel: bool, rule: Rule) -> None:
    """After one and three sub-chunks of one prompt, and within the new tokens of another one; a third has none."""
    slots, lengths, contexts = [1, 2, 3], [200, 30, 3], [0, 45, 9]
    within = {1: [(CHUNK, 4), (3 * CHUNK, 5)], 2: [(CHUNK - 45, 0)]}
    tokens = Tokens(*(each.to(DEVICE) for each in tokens_of(sum(lengths), by_channel=by_channel).all))
    before = torch.cat([states(), states(seed=1)[:1]]).to(DEVICE)
    ours, plain = before.clone(), before.clone()
    out = rule(*tokens.all, ours, on_device(state_rows(slots, lengths, contexts, snapshots=within)))
    expected = rule(*tokens.all, plain, on_device(state_rows(slots, lengths, contexts)))
    assert torch.equal(out, expected)
    assert torch.equal(ours[slots], plain[slots])
    starts = dict(zip(slots, (0, 200, 230), strict=True))
    for slot, snapshots in within.items():
        for length, target in snapshots:
            ended, part = before.clone(), slice(starts[slot], starts[slot] + length)
            rule(*tokens.at(part).all, ended, on_device(state_rows([slot], [length], [contexts[slot - 1]])))
            assert torch.equal(ours[target], ended[slot]), (slot, length)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_s_kernel_equals_its_twin(sigmoid: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = GatedRMSNorm(VALUES, eps=1e-5, dtype=dtype, sigmoid=sigmoid).requires_grad_(requires_grad=False)
    norm.weight.copy_(torch.rand(VALUES, generator=generator) + 0.5)
    x = torch.randn(5, 3, VALUES, generator=generator).to(dtype)
    gate = torch.randn(5, 4 * VALUES, generator=generator).to(dtype)[:, VALUES:].unflatten(-1, (3, VALUES))
    ours = gated_norm(x.to(DEVICE), gate.to(DEVICE), norm.weight.to(DEVICE), eps=1e-5, sigmoid=sigmoid)
    rtol = 2e-6 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(ours.cpu(), norm.in_torch(x, gate), rtol=rtol, atol=1e-6)


@by_decay
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_kernels_equal_their_twins(by_channel: bool, dtype: torch.dtype) -> None:
    """Also where a softplus is nearly 0, and where it is its argument."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 2 * HEADS, KEYS, generator=generator) * 15).to(dtype)[:, ::2]
    rates = torch.rand(HEADS, 1 if by_channel else KEYS, generator=generator)
    bias = torch.rand(HEADS, KEYS, generator=generator)
    ours = delta_gates.log_decays(*(each.to(DEVICE) for each in (x, rates, bias)))
    torch.testing.assert_close(ours.cpu(), log_decays(x, rates, bias), rtol=1e-4, atol=0)
    torch.testing.assert_close(delta_gates.sigmoids(x.to(DEVICE)).cpu(), correction_rates(x), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("channels", [300, 2048])
def test_gates_with_their_projection_equal_separate_calls(channels: int, by_head: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(3, channels, generator=generator).bfloat16()
    weight_BD = (torch.randn(2 * 3 * 2, channels, generator=generator) / channels**0.5).bfloat16()
    rates_HR, bias_HR = torch.rand(2, 3, 2, generator=generator)
    ba_TX = (x_TD.float() @ weight_BD.float().t()).bfloat16()
    b_THR, a_THR = ba_TX.view(-1, 3, 2, 2).unbind(2) if by_head else ba_TX.view(-1, 2, 3, 2).unbind(1)
    operands = (each.to(DEVICE) for each in (x_TD, weight_BD, rates_HR, bias_HR))
    decays_THR, rates_THR = delta_gates.project(*operands, by_head=by_head)
    # Sums may round to neighbours in bfloat16.
    torch.testing.assert_close(decays_THR.cpu(), log_decays(a_THR, rates_HR, bias_HR), rtol=0.02, atol=1e-3)
    torch.testing.assert_close(rates_THR.cpu(), correction_rates(b_THR), rtol=0.02, atol=1e-3)
