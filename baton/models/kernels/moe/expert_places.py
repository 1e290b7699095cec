"""Finds which copy of its expert each assignment uses, and counts the tokens of each place, in one launch.

Legend: T token, K choice of a token, S = T*K assignment, E expert, C copy of an expert, P place on some rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, overlap, start_dependents

_BLOCK = 256


def find_places(
    experts_TK: Tensor,
    turns_EC: Tensor,
    copies_E: Tensor,
    *,
    own: range,
    counts_P: Tensor | None = None,
    slots_T: Tensor | None = None,
) -> Tensor:
    """Returns int32 [T,K], the number of each expert's place on this rank; -1: the place is on another rank, or the row
    is padding.

    Args:
        turns_EC: int32, the places of each expert's copies, which take tokens in turn by their row. Below 0: the expert
            has no place.
        copies_E: int32, the number of copies of each expert.
        own: this rank's places.
        counts_P: int64; the assignments of each place are added. Additions commute, so the counts are exact.
        slots_T: int64; rows whose slot is below 0 are padding, which no expert computes. None: there is none.
    """
    num_tokens, choices = experts_TK.shape
    places_TK = torch.empty(num_tokens, choices, dtype=torch.int32, device=experts_TK.device)
    if num_tokens:
        _find_places[(triton.cdiv(num_tokens * choices, _BLOCK),)](
            experts_TK,
            turns_EC,
            copies_E,
            counts_P,
            slots_T,
            places_TK,
            num_tokens * choices,
            own.start,
            own.stop,
            CHOICES=choices,
            COPIES=turns_EC.shape[1],
            BLOCK=_BLOCK,
            **overlap(experts_TK.device, rows=num_tokens),
            num_warps=4,
        )
    return places_TK


@triton.jit(
    do_not_specialize=["num_assignments", "own_start", "own_stop"], do_not_specialize_on_alignment=["counts", "slots"]
)
def _find_places(
    experts,
    turns,
    copies,
    counts,
    slots,
    places,
    num_assignments,
    own_start,
    own_stop,
    CHOICES: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    assignments_S = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists_S = assignments_S < num_assignments
    rows_S = assignments_S // CHOICES
    experts_S = tl.load(experts + assignments_S, mask=exists_S, other=0).to(tl.int32)
    turn_S = rows_S % tl.load(copies + experts_S, mask=exists_S, other=1)
    places_S = tl.load(turns + experts_S * COPIES + turn_S, mask=exists_S, other=0)
    if slots is not None:
        is_padding_S = tl.load(slots + rows_S, mask=exists_S, other=-1) < 0
        places_S = tl.where(is_padding_S, -1, places_S)
    is_own_S = (places_S >= own_start) & (places_S < own_stop)
    tl.store(places + assignments_S, tl.where(is_own_S, places_S - own_start, -1), mask=exists_S)
    if counts is not None:
        counted_S = exists_S & (places_S >= 0)
        ones_S = tl.full([BLOCK], 1, tl.int64)
        tl.atomic_add(counts + places_S, ones_S, mask=counted_S, sem="relaxed")
