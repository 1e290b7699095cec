"""Sorts assignments by expert and cuts them into tiles of one expert each. The result stays on the device: the host
knows only the largest possible number of tiles.

Legend: T token, K choice of a token, S = T*K assignment, P place in the order, E expert, L tile, C assignment
of a part, H chunk of assignments.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents

# Up to this many assignments every program counts all of them itself, which saves a launch.
_COUNTED_BY_EACH = 4096
_PART = 128
_CHUNK = 1024
_TILES = 64
_NUM_WARPS = 8


@dataclass(frozen=True)
class ExpertOrder:
    """Assignments in the order of their experts; those of one expert stay in the order of their tokens.

    Attributes:
        order_P: int32, the assignment in each place. None: each assignment is in its own place and has its own tile.
        tiles_3L: int32, each tile's expert, its first place, and the end of its expert's places; the expert of an
            unused tile is -1. Without `order_P` [1,L], only the experts, of any integer type.
    """

    order_P: Tensor | None
    tiles_3L: Tensor

    @property
    def num_tiles(self) -> int:
        return self.tiles_3L.shape[1]


def num_tiles_max(num_assignments: int, num_experts: int, tile_tokens: int) -> int:
    """Returns a number of tiles that suffices for any choice: each chosen expert may have one partial tile."""
    return (num_assignments + min(num_assignments, num_experts) * (tile_tokens - 1)) // tile_tokens


def order_by_expert(experts_TK: Tensor, *, num_experts: int, tile_tokens: int, partial: bool = False) -> ExpertOrder:
    """Returns the order of the assignments. A single token's experts all differ and need no sorting."""
    if len(experts_TK) == 1:
        return ExpertOrder(None, experts_TK)
    return sort_assignments(experts_TK, num_experts=num_experts, tile_tokens=tile_tokens, partial=partial)


def sort_assignments(experts_TK: Tensor, *, num_experts: int, tile_tokens: int, partial: bool = False) -> ExpertOrder:
    """Launches the sorting.

    Args:
        experts_TK: contiguous, at least one, each in [0, num_experts).
        partial: some are below 0, for experts of other ranks; these come last and have no tile.
    """
    num_assignments = experts_TK.numel()
    overlapping = overlap(experts_TK.device, rows=len(experts_TK))
    num_tiles = num_tiles_max(num_assignments, num_experts + partial, tile_tokens)
    padded_experts = triton.next_power_of_2(num_experts + partial)
    counts_HE = None
    chunk = _PART
    if num_assignments > _COUNTED_BY_EACH:
        chunk = _CHUNK
        num_chunks = triton.cdiv(num_assignments, chunk)
        counts_HE = torch.empty(num_chunks, padded_experts, dtype=torch.int32, device=experts_TK.device)
        _count[(num_chunks,)](
            experts_TK,
            counts_HE,
            num_assignments,
            EXPERTS=padded_experts,
            CHUNK=chunk,
            **overlapping,
            num_warps=_NUM_WARPS,
        )
    order_P = torch.empty(num_assignments, dtype=torch.int32, device=experts_TK.device)
    tiles_3L = torch.empty(3, num_tiles, dtype=torch.int32, device=experts_TK.device)
    _place[(max(triton.cdiv(num_assignments, chunk), triton.cdiv(num_tiles, _TILES)),)](
        experts_TK,
        counts_HE,
        order_P,
        tiles_3L,
        num_assignments,
        num_tiles,
        0 if counts_HE is None else len(counts_HE),
        tile_tokens,
        EXPERTS=padded_experts,
        CHUNK=chunk,
        PART=_PART,
        TILES=_TILES,
        PARTIAL=partial,
        INTERPRETED=interpreted(),
        **overlapping,
        num_warps=_NUM_WARPS,
    )
    return ExpertOrder(order_P, tiles_3L)


@triton.jit(do_not_specialize=["num_assignments"])
def _count(experts, counts, num_assignments, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """Counts each expert's assignments in a chunk."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    assignments_C = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    exists_C = assignments_C < num_assignments
    experts_C = _experts(experts, assignments_C, exists_C, EXPERTS)
    counts_E = tl.histogram(experts_C, EXPERTS, mask=exists_C)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), counts_E)


@triton.jit(do_not_specialize=["num_assignments", "num_tiles", "num_chunks", "tile_tokens"])
def _place(
    experts,
    counts,
    order,
    tiles,
    num_assignments,
    num_tiles,
    num_chunks,
    tile_tokens,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    TILES: tl.constexpr,
    PARTIAL: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes the places of a chunk of assignments, and some of the tiles."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    first = tl.program_id(0) * CHUNK
    if counts is None:
        totals_E, before_E = _count_all(experts, num_assignments, first, EXPERTS, INTERPRETED)
    else:
        totals_E, before_E = _add_counts(counts, num_chunks, EXPERTS, INTERPRETED)
    starts_E = tl.cumsum(totals_E, 0) - totals_E
    _write_tiles(tiles, starts_E, totals_E, num_tiles, tile_tokens, TILES, PARTIAL)
    next_E = starts_E + before_E
    within_C = tl.arange(0, PART)
    for part in range(0, CHUNK, PART):
        assignments_C = first + part + within_C
        exists_C = assignments_C < num_assignments
        experts_C = _experts(experts, assignments_C, exists_C, EXPERTS)
        is_before_CC = (experts_C[:, None] == experts_C[None, :]) & (within_C[:, None] > within_C[None, :])
        places_C = tl.gather(next_E, experts_C, 0) + tl.sum(is_before_CC.to(tl.int32), 1)
        tl.store(order + places_C, assignments_C, mask=exists_C)
        next_E += tl.histogram(experts_C, EXPERTS, mask=exists_C)


@triton.jit
def _experts(experts, assignments_C, exists_C, EXPERTS: tl.constexpr):
    """Returns the experts of assignments; the last number, EXPERTS - 1, for assignments below 0."""
    experts_C = tl.load(experts + assignments_C, mask=exists_C, other=0).to(tl.int32)
    return tl.where(experts_C < 0, EXPERTS - 1, experts_C)


@triton.jit
def _count_all(experts, num_assignments, first, EXPERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Returns (number of each expert's assignments, number of them before `first`)."""
    STEP: tl.constexpr = 1024
    totals_E = tl.zeros([EXPERTS], tl.int32)
    before_E = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, bound(num_assignments, INTERPRETED), STEP):
        assignments_C = start + tl.arange(0, STEP)
        exists_C = assignments_C < num_assignments
        experts_C = _experts(experts, assignments_C, exists_C, EXPERTS)
        totals_E += tl.histogram(experts_C, EXPERTS, mask=exists_C)
        before_E += tl.histogram(experts_C, EXPERTS, mask=exists_C & (assignments_C < first))
    return totals_E, before_E


@triton.jit
def _add_counts(counts, num_chunks, EXPERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Returns the result of `_count_all` from the counts of all chunks."""
    STEP: tl.constexpr = 32
    totals_E = tl.zeros([EXPERTS], tl.int32)
    before_E = tl.zeros([EXPERTS], tl.int32)
    experts_E = tl.arange(0, EXPERTS)
    for start in range(0, bound(num_chunks, INTERPRETED), STEP):
        chunks_H = start + tl.arange(0, STEP)
        counts_ptrs_HE = counts + chunks_H[:, None] * EXPERTS + experts_E[None, :]
        counts_HE = tl.load(counts_ptrs_HE, mask=(chunks_H < num_chunks)[:, None], other=0)
        totals_E += tl.sum(counts_HE, 0)
        before_E += tl.sum(tl.where((chunks_H < tl.program_id(0))[:, None], counts_HE, 0), 0)
    return totals_E, before_E


@triton.jit
def _write_tiles(tiles, starts_E, totals_E, num_tiles, tile_tokens, TILES: tl.constexpr, PARTIAL: tl.constexpr):
    EXPERTS: tl.constexpr = totals_E.shape[0]
    tiles_E = (totals_E + tile_tokens - 1) // tile_tokens
    tile_stops_E = tl.cumsum(tiles_E, 0)
    tiles_L = tl.program_id(0) * TILES + tl.arange(0, TILES)
    behind_LE = tile_stops_E[None, :] <= tiles_L[:, None]
    experts_L = tl.sum(behind_LE.to(tl.int32), 1)
    LAST: tl.constexpr = EXPERTS - 1 if PARTIAL else EXPERTS
    needed_L = experts_L < LAST
    known_L = tl.minimum(experts_L, EXPERTS - 1)
    nth_L = tiles_L - tl.gather(tile_stops_E - tiles_E, known_L, 0)
    places_L = tl.gather(starts_E, known_L, 0) + nth_L * tile_tokens
    stops_L = tl.gather(starts_E + totals_E, known_L, 0)
    exists_L = tiles_L < num_tiles
    tl.store(tiles + tiles_L, tl.where(needed_L, experts_L, -1), mask=exists_L)
    tl.store(tiles + num_tiles + tiles_L, places_L, mask=exists_L)
    tl.store(tiles + 2 * num_tiles + tiles_L, stops_L, mask=exists_L)
