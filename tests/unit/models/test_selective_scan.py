"""The scan of Mamba-2 continues sequences from their states, in any cut, next to others and next to padding; and what
is around it in a layer. Both twins equal the recurrence, token by token, in float64.

Legend: T token, S slot, H head, G group, P channel of a head, N number of a channel's state.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from baton.models.kernels.recurrent import selective_scan as kernels
from baton.models.kernels.recurrent.gated_group_norm import gated_group_norm
from baton.models.kernels.recurrent.selective_scan_chunks import SUB_CHUNK, choose_stages
from baton.models.kernels.recurrent.shared_inputs import share_inputs
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.recurrent.gated_group_norm import GatedGroupNorm
from baton.models.layers.recurrent.selective_scan import (
    ScanWeights,
    selective_scan_in_torch,
    share_inputs_in_torch,
)
from tests.device import DEVICE
from tests.unit.models.recurrent_steps import state_rows

SLOTS, HEADS, GROUPS, CHANNELS, NUMBERS = 5, 4, 2, 20, 24
by_twin = pytest.mark.parametrize("twin", ["torch", "triton"])


@dataclass(frozen=True)
class Sequence:
    x_THP: Tensor
    dt_TH: Tensor
    b_TGN: Tensor
    c_TGN: Tensor

    def part(self, start: int, stop: int) -> "Sequence":
        each = (self.x_THP, self.dt_TH, self.b_TGN, self.c_TGN)
        return Sequence(*(tensor[start:stop] for tensor in each))

    def __add__(self, other: "Sequence") -> "Sequence":
        ours, theirs = ((each.x_THP, each.dt_TH, each.b_TGN, each.c_TGN) for each in (self, other))
        return Sequence(*(torch.cat(pair) for pair in zip(ours, theirs, strict=True)))


def sequence(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, CHANNELS), (HEADS,), (GROUPS, NUMBERS), (GROUPS, NUMBERS))
    return Sequence(*(torch.randn(length, *each, generator=generator).to(DEVICE, dtype) for each in sizes))


def weights(dt_min: float = 0.0, dt_max: float = math.inf) -> ScanWeights:
    generator = torch.Generator().manual_seed(9)
    rate, skip, bias = (torch.rand(HEADS, generator=generator).to(DEVICE) for _ in range(3))
    return ScanWeights(rate.log(), skip, bias - 2.0, dt_min, dt_max)


def states() -> Tensor:
    """Other numbers lie between those of the heads; stale ones are in all of them."""
    wide = torch.full((SLOTS, HEADS, CHANNELS * NUMBERS + 9), torch.nan, device=DEVICE)
    view: Tensor = wide[..., 4:-5].unflatten(-1, (CHANNELS, NUMBERS))
    return view


def scan(twin: str, tokens: Sequence, learnt: ScanWeights, state: Tensor, rows: StateRows) -> Tensor:
    operands = (tokens.x_THP, tokens.dt_TH, tokens.b_TGN, tokens.c_TGN)
    if twin == "torch":
        return selective_scan_in_torch(*operands, learnt, state, rows)
    per_head = (learnt.log_rate_H, learnt.skip_H, learnt.dt_bias_H)
    return kernels.selective_scan(*operands, per_head, (learnt.dt_min, learnt.dt_max), state, rows)


def expected(tokens: Sequence, learnt: ScanWeights) -> tuple[Tensor, Tensor]:
    """Outputs, and the last state, of a whole sequence."""
    x_THP = tokens.x_THP.double()
    b_THN, c_THN = (each.double().repeat_interleave(HEADS // GROUPS, 1) for each in (tokens.b_TGN, tokens.c_TGN))
    dt_TH = softplus(tokens.dt_TH.double() + learnt.dt_bias_H.double()).clamp(learnt.dt_min, learnt.dt_max)
    state = x_THP.new_zeros(HEADS, CHANNELS, NUMBERS)
    out = []
    for x_HP, dt_H, b_HN, c_HN in zip(x_THP, dt_TH, b_THN, c_THN, strict=True):
        state = state * (-dt_H * learnt.log_rate_H.double().exp()).exp()[:, None, None]
        state = state + (dt_H[:, None] * x_HP)[:, :, None] * b_HN[:, None]
        out.append((state * c_HN[:, None]).sum(-1) + learnt.skip_H[:, None] * x_HP)
    return torch.stack(out).float(), state.float()


@by_twin
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.1, 0.3)])
def test_sequences_in_chunks_equal_the_recurrence(twin: str, limits: tuple[float, float]) -> None:
    learnt, state = weights(*limits), states()
    first, second = sequence(150, 1), sequence(150, 2)
    ours: dict[int, list[Tensor]] = {3: [], 1: []}

    def step(*requests: tuple[int, int, int]) -> None:
        """(slot, start, stop) each."""
        lengths = [stop - start for _, start, stop in requests]
        rows = state_rows([slot for slot, *_ in requests], lengths, [start for _, start, _ in requests], device=DEVICE)
        parts = [(first if slot == 3 else second).part(start, stop) for slot, start, stop in requests]
        tokens = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        for (slot, *_), out in zip(requests, scan(twin, tokens, learnt, state, rows).split(lengths), strict=True):
            ours[slot].append(out)

    step((3, 0, 137), (1, 0, 2))
    step((3, 137, 138), (1, 2, 66))
    step((1, 66, 67), (3, 138, 139))
    step((1, 67, 68), (3, 139, 150))
    step((1, 68, 150))
    for slot, tokens in ((3, first), (1, second)):
        out, last = expected(tokens, learnt)
        torch.testing.assert_close(torch.cat(ours[slot]), out, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(state[slot], last, rtol=2e-5, atol=2e-5)


@by_twin
def test_cuts_at_multiples_of_a_sub_chunk_keep_the_bits(twin: str) -> None:
    tokens, learnt = sequence(3 * SUB_CHUNK + 5, 3), weights()

    def computed(*cuts: int) -> tuple[Tensor, Tensor]:
        state, out = states(), []
        for start, stop in pairwise((0, *cuts, 3 * SUB_CHUNK + 5)):
            rows = state_rows([2], [stop - start], [start], device=DEVICE)
            out.append(scan(twin, tokens.part(start, stop), learnt, state, rows))
        return torch.cat(out), state[2]

    whole, cut = computed(), computed(SUB_CHUNK, 3 * SUB_CHUNK)
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


@by_twin
def test_a_request_has_the_same_bits_alone_and_next_to_others(twin: str) -> None:
    """Two decodes and two prompts, in one step and in four."""
    learnt, lengths, contexts = weights(), [1, 1, 70, 5], [7, 64, 30, 0]
    tokens, drawn = sequence(sum(lengths), 5), torch.Generator().manual_seed(6)
    together = states()
    together.copy_(torch.randn(together.shape, generator=drawn))
    apart = together.clone()
    rows = state_rows(range(4), lengths, contexts, device=DEVICE)
    outs = scan(twin, tokens, learnt, together, rows).split(lengths)
    start = 0
    for slot, (length, context, out) in enumerate(zip(lengths, contexts, outs, strict=True)):
        one = state_rows([slot], [length], [context], device=DEVICE)
        assert torch.equal(scan(twin, tokens.part(start, start + length), learnt, apart, one), out)
        assert torch.equal(apart[slot], together[slot])
        start += length


@by_twin
def test_snapshots_within_prompts_have_the_bits_of_prompts_that_end_there(twin: str) -> None:
    """After one and three sub-chunks of one prompt, and within the new tokens of another one."""
    slots, lengths, contexts = [1, 2], [200, 30], [0, 45]
    within = {1: [(SUB_CHUNK, 3), (3 * SUB_CHUNK, 4)], 2: [(SUB_CHUNK - 45, 0)]}
    tokens, learnt, before = sequence(sum(lengths), 5), weights(), states()
    before.copy_(torch.randn(before.shape, generator=torch.Generator().manual_seed(6)))
    ours, plain = before.clone(), before.clone()
    out = scan(twin, tokens, learnt, ours, state_rows(slots, lengths, contexts, snapshots=within, device=DEVICE))
    expected_THP = scan(twin, tokens, learnt, plain, state_rows(slots, lengths, contexts, device=DEVICE))
    assert torch.equal(out, expected_THP)
    assert torch.equal(ours[slots], plain[slots])
    for slot, snapshots in within.items():
        start, context = (0, 0) if slot == 1 else (200, 45)
        for length, target in snapshots:
            ended, rows = before.clone(), state_rows([slot], [length], [context], device=DEVICE)
            scan(twin, tokens.part(start, start + length), learnt, ended, rows)
            assert torch.equal(ours[target], ended[slot]), (slot, length)


@by_twin
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(twin: str, dtype: torch.dtype) -> None:
    tokens, learnt = sequence(70, 4, dtype), weights()
    out = scan(twin, tokens, learnt, states(), state_rows([0], [70], [0], device=DEVICE))
    assert out.dtype is dtype
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(out.float(), expected(tokens, learnt)[0], rtol=tolerance, atol=tolerance)


@by_twin
def test_small_steps_in_time_keep_their_digits(twin: str) -> None:
    tokens = sequence(40, 5)
    bias, rate, skip = (torch.full((HEADS,), value, device=DEVICE) for value in (-14.0, -7.0, 0.0))
    learnt = replace(weights(), dt_bias_H=bias, log_rate_H=rate, skip_H=skip)
    out = scan(twin, tokens, learnt, states(), state_rows([0], [40], [0], device=DEVICE))
    torch.testing.assert_close(out, expected(tokens, learnt)[0], rtol=1e-4, atol=1e-9)


@by_twin
def test_rows_of_padding_read_and_write_nothing(twin: str) -> None:
    """Also a row with a length and no slot. The prompt's tokens follow the decode, where padding also has room."""
    state, tokens, learnt = states(), sequence(9, 6), weights()
    untouched = state.clone()
    rows = state_rows([4, 2], [1, 6], [0, 0], device=DEVICE)
    rows = replace(rows, decode_lens_N=torch.tensor([1, 7, 0], dtype=torch.int32, device=DEVICE))
    out = scan(twin, tokens, learnt, state, rows)
    assert out[7:].isfinite().all()
    torch.testing.assert_close(out[:1], expected(tokens.part(0, 1), learnt)[0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(out[1:7], expected(tokens.part(1, 7), learnt)[0], rtol=2e-5, atol=2e-5)
    for slot in {*range(SLOTS)} - {2, 4}:
        assert torch.equal(state[slot].nan_to_num(), untouched[slot].nan_to_num())
    assert state[2].isfinite().all()


@by_twin
def test_a_step_of_padding_alone_changes_nothing(twin: str) -> None:
    state = states()
    state[:] = 1.0
    scan(twin, sequence(3, 7), weights(), state, state_rows([], [], [], device=DEVICE))
    assert bool((state == 1.0).all())


def shared(twin: str, conv_SHXW: Tensor, rows: StateRows) -> None:
    twins = {"torch": share_inputs_in_torch, "triton": share_inputs}
    twins[twin](conv_SHXW, rows, num_groups=GROUPS)


@by_twin
def test_all_heads_of_a_group_keep_what_its_first_head_keeps(twin: str) -> None:
    """Those of a decode, a prompt and a prompt's snapshot."""
    conv = torch.randn(SLOTS, HEADS, 700, 3, generator=torch.Generator().manual_seed(8)).to(DEVICE)[:, :, 7:]
    before = conv.clone()
    shared(twin, conv, state_rows([4, 1], [1, 5], [3, 0], snapshots={1: [(4, 2)]}, device=DEVICE))
    firsts = before[:, :: HEADS // GROUPS].repeat_interleave(HEADS // GROUPS, dim=1)
    for slot in range(SLOTS):
        assert torch.equal(conv[slot], (firsts if slot in (1, 2, 4) else before)[slot]), slot
    after = conv.clone()
    shared(twin, conv, state_rows([], [], [], device=DEVICE))
    assert torch.equal(conv, after)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gated_norm_s_kernel_equals_its_twin(num_groups: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    x_TX, gate_TX = (torch.randn(5, 130, generator=generator).to(DEVICE, dtype)[:, 4:124] * 3 for _ in range(2))
    norm = GatedGroupNorm(120, num_groups=num_groups, ranks_per_group=1, eps=1e-5, dtype=dtype)
    norm.requires_grad_(requires_grad=False)
    norm.weight.uniform_(0.5, 1.5, generator=generator)
    norm = norm.to(DEVICE)
    ours = gated_group_norm(x_TX, gate_TX, norm.weight, num_groups=num_groups, eps=1e-5)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(ours, norm.in_torch(x_TX, gate_TX), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared", [101_376, 166_912, 232_448])
@pytest.mark.parametrize("numbers", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sub_chunks_in_flight_fit_the_shared_memory(dtype: torch.dtype, numbers: int, shared: int) -> None:
    """Compiled for an H200 in bfloat16: 158,216 bytes with three of 128 numbers, 173,316 with two of 256, 256,520 with
    three."""
    stages = choose_stages(dtype, numbers, 64, shared=shared)
    assert 1 <= stages <= 3
    assert stages == 1 or stages * 64 * 2 * (numbers + 64) * dtype.itemsize < shared - 4096


def test_as_many_sub_chunks_are_in_flight_as_an_h200_has_room_for() -> None:
    sizes = {numbers: choose_stages(torch.bfloat16, numbers, 64, shared=232_448) for numbers in (64, 128, 256)}
    assert sizes == {64: 3, 128: 3, 256: 2}
