"""The scan of Mamba-2 on a GPU at the widths of Granite 4 and Nemotron-H: near its twin, the same bits however a prompt
is cut at multiples of a sub-chunk, no wait for the device, and decodes in a CUDA graph.

Legend: T token, S slot, H head, G group, P channel of a head, N number of a channel's state, W - 1 earlier inputs.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.models.kernels.recurrent.selective_scan_chunks import SUB_CHUNK
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.layers.recurrent.gated_group_norm import GatedGroupNorm
from baton.models.layers.recurrent.selective_scan import (
    ScanWeights,
    selective_scan,
    selective_scan_in_torch,
    share_inputs,
    share_inputs_in_torch,
)
from tests.conformance.attention.oracle import relative_error
from tests.gpu.waiting import no_waiting
from tests.unit.models.recurrent_steps import state_rows

pytestmark = pytest.mark.gpu

HEADS, CHANNELS, NUMBERS, SLOTS = 128, 64, 128, 6
by_groups = pytest.mark.parametrize("groups", [1, 8])
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def operands(tokens: int, groups: int, dtype: torch.dtype, seed: int = 0, numbers: int = NUMBERS) -> Operands:
    """As a layer has them: x, and B with C, are parts of wider rows."""
    torch.manual_seed(seed)
    x_TX = torch.randn(tokens, HEADS * CHANNELS + 64, device="cuda", dtype=dtype)[:, 64:]
    bc_TX = torch.randn(tokens, 2 * groups * numbers, device="cuda", dtype=dtype)
    b_TGN, c_TGN = (part.unflatten(-1, (groups, numbers)) for part in bc_TX.chunk(2, dim=-1))
    dt_TH = torch.randn(tokens, HEADS + 8, device="cuda", dtype=dtype)[:, 8:]
    return x_TX.unflatten(-1, (HEADS, CHANNELS)), dt_TH, b_TGN, c_TGN


def learnt() -> ScanWeights:
    torch.manual_seed(1)
    return ScanWeights(
        torch.rand(HEADS, device="cuda") * 4 - 4,
        torch.rand(HEADS, device="cuda"),
        torch.rand(HEADS, device="cuda") * 4 - 5,
        0.001,
        math.inf,
    )


def states(numbers: int = NUMBERS) -> Tensor:
    """As in the cache: after other numbers of each head."""
    wide = torch.randn(SLOTS, HEADS, 960 + CHANNELS * numbers, device="cuda")
    view: Tensor = wide[..., 960:].unflatten(-1, (CHANNELS, numbers))
    return view


@by_groups
@by_dtype
def test_decodes_and_prompts_come_near_the_twin(dtype: torch.dtype, groups: int) -> None:
    lengths, contexts = [1, 1, 300, 65], [40, 0, 0, 77]
    rows = state_rows([3, 0, 5, 1], lengths, contexts, device="cuda")
    tokens, weights, ours = operands(sum(lengths), groups, dtype), learnt(), states()
    twin = ours.clone()
    selective_scan(*tokens, weights, ours.clone(), rows)  # compiles
    with no_waiting():
        out_THP = selective_scan(*tokens, weights, ours, rows)
    expected_THP = selective_scan_in_torch(*tokens, weights, twin, rows)
    tolerance = {torch.bfloat16: 5e-3, torch.float16: 2e-3, torch.float32: 3e-5}[dtype]
    assert relative_error(out_THP.float(), expected_THP.float()) < tolerance
    assert relative_error(ours, twin) < {torch.float32: 3e-5}.get(dtype, 1e-3)


@pytest.mark.parametrize("numbers", [16, 256])
def test_states_of_other_sizes_come_near_the_twin(numbers: int) -> None:
    """Falcon-H1's have 256 numbers for each channel."""
    rows = state_rows([5], [300], [0], device="cuda")
    tokens, weights, ours = operands(300, 1, torch.bfloat16, numbers=numbers), learnt(), states(numbers)
    twin = ours.clone()
    out_THP = selective_scan(*tokens, weights, ours, rows)
    expected_THP = selective_scan_in_torch(*tokens, weights, twin, rows)
    assert relative_error(out_THP.float(), expected_THP.float()) < 5e-3
    assert relative_error(ours, twin) < 1e-3


@by_groups
@by_dtype
def test_cuts_at_multiples_of_a_sub_chunk_keep_the_bits(dtype: torch.dtype, groups: int) -> None:
    length = 5 * SUB_CHUNK + 9
    tokens, weights = operands(length, groups, dtype), learnt()

    def computed(*cuts: int) -> tuple[Tensor, Tensor]:
        state, out = states(), []
        for start, stop in pairwise((0, *cuts, length)):
            rows = state_rows([2], [stop - start], [start], device="cuda")
            x_THP, dt_TH, b_TGN, c_TGN = (each[start:stop] for each in tokens)
            out.append(selective_scan(x_THP, dt_TH, b_TGN, c_TGN, weights, state, rows))
        return torch.cat(out), state[2]

    whole, cut = computed(), computed(SUB_CHUNK, 2 * SUB_CHUNK, 4 * SUB_CHUNK)
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[1], cut[1])


@by_groups
@by_dtype
def test_snapshots_within_prompts_have_the_bits_of_cuts(dtype: torch.dtype, groups: int) -> None:
    """A batch of a decode and two prompts; one of the prompts continues a state."""
    slots, lengths, contexts = [3, 0, 5], [1, 300, 65], [40, 0, 77]
    within = {0: [(SUB_CHUNK, 1), (4 * SUB_CHUNK, 2)], 5: [(2 * SUB_CHUNK - 77, 4)]}
    tokens, weights, before = operands(sum(lengths), groups, dtype), learnt(), states()
    ours, plain = before.clone(), before.clone()
    out_THP = selective_scan(*tokens, weights, plain, state_rows(slots, lengths, contexts, device="cuda"))
    rows = state_rows(slots, lengths, contexts, snapshots=within, device="cuda")
    assert torch.equal(selective_scan(*tokens, weights, ours, rows), out_THP)
    assert torch.equal(ours[slots], plain[slots])
    for slot, start, context in ((0, 1, 0), (5, 301, 77)):
        for length, target in within[slot]:
            x_THP, dt_TH, b_TGN, c_TGN = (each[start : start + length] for each in tokens)
            cut, one = before.clone(), state_rows([slot], [length], [context], device="cuda")
            selective_scan(x_THP, dt_TH, b_TGN, c_TGN, weights, cut, one)
            assert torch.equal(ours[target], cut[slot]), (slot, length)


def decode_rows(count: int) -> StateRows:
    return state_rows(list(range(count)), [1] * count, [9] * (count - 1) + [0], device="cuda")


@pytest.mark.parametrize("scan", [selective_scan, selective_scan_in_torch])
def test_decodes_replay_in_a_graph(scan: object) -> None:
    """Replayed with other inputs over other states; the last request is new, and two rows are padding."""
    assert callable(scan)
    rows, tokens, weights = decode_rows(4), operands(6, 1, torch.bfloat16), learnt()
    rows = StateRows(
        rows.decode_slots_N, rows.decode_lens_N, rows.prompt_slots_P[:0], rows.prompt_starts_P1[:1],
        rows.prompt_context_P[:0], rows.snapshot_slots_PM[:0], rows.snapshot_lens_PM[:0], 0,
    )  # fmt: skip
    captured = states()
    scan(*tokens, weights, captured.clone(), rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THP = scan(*tokens, weights, captured, rows)
    before = states()
    captured.copy_(before)
    for each, other in zip(tokens, operands(6, 1, torch.bfloat16, seed=5), strict=True):
        each.copy_(other)
    graph.replay()
    expected_THP = selective_scan_in_torch(*tokens, weights, before, rows)
    assert relative_error(out_THP[:4].float(), expected_THP[:4].float()) < 5e-3
    assert relative_error(captured, before) < 1e-5


@by_groups
def test_shared_inputs_are_copied(groups: int) -> None:
    conv = torch.randn(SLOTS, HEADS, 64 + 2 * NUMBERS, 3, device="cuda")[:, :, 64:]
    twin = conv.clone()
    rows = state_rows([4, 2], [1, 5], [3, 0], device="cuda")
    share_inputs(conv, rows, num_groups=groups)
    share_inputs_in_torch(twin, rows, num_groups=groups)
    assert torch.equal(conv, twin)


@by_groups
@by_dtype
def test_the_gated_norm_comes_near_its_twin(dtype: torch.dtype, groups: int) -> None:
    norm = GatedGroupNorm(HEADS * CHANNELS, num_groups=groups, ranks_per_group=1, eps=1e-5, dtype=dtype)
    norm = norm.cuda().requires_grad_(requires_grad=False)
    norm.weight.uniform_(0.5, 1.5)
    x_TX = torch.randn(70, HEADS * CHANNELS, device="cuda", dtype=dtype)
    gate_TX = torch.randn(70, 2 * HEADS * CHANNELS, device="cuda", dtype=dtype)[:, : HEADS * CHANNELS]
    tolerance = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]
    assert relative_error(norm(x_TX, gate_TX).float(), norm.in_torch(x_TX, gate_TX).float()) < tolerance
