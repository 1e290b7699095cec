"""Merges each request's partial results, the last step of split decodes.

Legend: R requests, H query heads, P partial results of a request, D channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.plan import DecodePlan, units_per_worker
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents

_LOG2_E = tl.constexpr(1.4426950408889634)


def merge_partials(
    plan: DecodePlan, *, queries_per_request: int, sinks_H: Tensor | None, out: Tensor, lse_HR: Tensor | None
) -> None:
    """Writes the results of requests that several workers shared and of requests without keys; the workers wrote the
    others."""
    num_rows, num_heads, head_size = out.shape
    # In large batches most requests have one worker and the rest few, so few programs suffice.
    many = 4 * num_rows > plan.num_workers
    block_h, block_p = (min(8, triton.next_power_of_2(num_heads)), 4) if many else (1, 32)
    _merge_kernel[(triton.cdiv(num_heads, block_h), num_rows)](
        plan.partials.out,
        plan.partials.lse2,
        plan.unit_starts,
        sinks_H,
        out,
        lse_HR,
        num_rows // queries_per_request,
        plan.num_workers,
        num_heads,
        queries_per_request,
        out.stride(0),
        out.stride(1),
        0 if lse_HR is None else lse_HR.stride(0),
        HEAD_SIZE=head_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_H=block_h,
        BLOCK_P=block_p,
        INTERPRETED=interpreted(),
        **overlap(out.device, rows=num_rows),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_workers", "stride_lse_h"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse2_ptr,
    unit_starts_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    num_reqs,
    num_workers,
    num_heads,
    num_queries,
    stride_out_r,
    stride_out_h,
    stride_lse_h,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges the partial results of BLOCK_H heads of one query, in order; writes the result without keys if there are
    none."""
    start_dependents(OVERLAP)
    row = tl.program_id(1)
    request = row // num_queries
    first_unit = tl.load(unit_starts_ptr + request)
    last_unit = tl.load(unit_starts_ptr + request + 1)
    share = units_per_worker(tl.load(unit_starts_ptr + num_reqs), num_workers)
    first_worker = first_unit // share
    first_place = request + first_worker
    num_partials = tl.where(last_unit > first_unit, (last_unit - 1) // share - first_worker + 1, 0)
    await_predecessors(OVERLAP)
    if num_partials == 1:  # the only worker has written the result
        return

    heads_H = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_H = heads_H < num_heads
    channels_D = tl.arange(0, BLOCK_D)
    mask_HD = mask_H[:, None] & (channels_D < HEAD_SIZE)[None, :]
    acc_HD = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    max_lse2_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    if sinks_ptr is not None:
        max_lse2_H = tl.load(sinks_ptr + heads_H, mask=mask_H, other=0.0).to(tl.float32) * _LOG2_E
        total_H += 1.0
    for start in tl.range(0, bound(num_partials, INTERPRETED), BLOCK_P):
        partials_P = start + tl.arange(0, BLOCK_P)
        places_P = ((first_place + partials_P).to(tl.int64) * num_queries + row % num_queries) * num_heads
        places_HP = places_P[None, :] + heads_H[:, None]
        mask_HP = (partials_P < num_partials)[None, :] & mask_H[:, None]
        lse2_HP = tl.load(partial_lse2_ptr + places_HP, mask=mask_HP, other=float("-inf"))
        out_HPD = tl.load(
            partial_out_ptr + places_HP[:, :, None] * HEAD_SIZE + channels_D[None, None, :],
            mask=mask_HP[:, :, None] & (channels_D < HEAD_SIZE)[None, None, :],
            other=0.0,
        )
        # Heads past the last have no partial results, and -inf minus -inf is NaN.
        new_max_H = tl.where(mask_H, tl.maximum(max_lse2_H, tl.max(lse2_HP, 1)), 0.0)
        rescale_H = tl.exp2(max_lse2_H - new_max_H)
        weights_HP = tl.exp2(lse2_HP - new_max_H[:, None])
        total_H = total_H * rescale_H + tl.sum(weights_HP, 1)
        acc_HD = acc_HD * rescale_H[:, None] + tl.sum(out_HPD * weights_HP[:, :, None], 1)
        max_lse2_H = new_max_H
    total_H = tl.where(mask_H & (max_lse2_H > float("-inf")), total_H, 1.0)
    out_HD = acc_HD / total_H[:, None]
    places_HD = row.to(tl.int64) * stride_out_r + heads_H[:, None] * stride_out_h + channels_D[None, :]
    tl.store(out_ptr + places_HD, out_HD.to(out_ptr.dtype.element_ty), mask=mask_HD)
    if lse_ptr is not None:
        lse_H = (max_lse2_H + tl.log2(total_H)) / _LOG2_E
        tl.store(lse_ptr + heads_H * stride_lse_h + row, lse_H, mask=mask_H)
