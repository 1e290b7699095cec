"""The last step of split decodes: each request's partial results become one. Knows the plan, no keys and no queries.

Legend: R requests, H query heads, P partial results of a request, D channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode_plan import DecodePlan, units_per_worker
from attention.kernels.launch import bound, interpreted

_LOG2_E = tl.constexpr(1.4426950408889634)
# Partial results that are in flight at once. Part of what makes a result's bits, so it depends on no batch.
_BLOCK_P = 32


def merge_partials(
    plan: DecodePlan, *, queries_per_request: int, sinks_H: Tensor | None, out: Tensor, lse_HR: Tensor | None
) -> None:
    """Writes the requests that several workers shared, and those without keys; the others are written already."""
    num_rows, num_heads, head_size = out.shape
    _merge_kernel[(num_heads, num_rows)](
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
        BLOCK_P=_BLOCK_P,
        ONE_UNIT_EACH=plan.one_unit_each,
        INTERPRETED=interpreted(),
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
    BLOCK_P: tl.constexpr,
    ONE_UNIT_EACH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One head of one query: its request's partial results in order, or what a request without keys comes to."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    request = row // num_queries
    first_unit = tl.load(unit_starts_ptr + request)
    last_unit = tl.load(unit_starts_ptr + request + 1)
    if ONE_UNIT_EACH:
        first_place = first_unit
        num_partials = last_unit - first_unit
    else:
        share = units_per_worker(tl.load(unit_starts_ptr + num_reqs), num_workers)
        first_worker = first_unit // share
        first_place = request + first_worker
        num_partials = tl.where(last_unit > first_unit, (last_unit - 1) // share - first_worker + 1, 0)
    if num_partials == 1:  # its one worker has written the result
        return

    channels_D = tl.arange(0, BLOCK_D)
    in_head_D = channels_D < HEAD_SIZE
    acc_D = tl.zeros([BLOCK_D], tl.float32)
    max_lse2 = float("-inf")
    total = 0.0
    if sinks_ptr is not None:
        max_lse2 = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2_E
        total = 1.0
    for start in tl.range(0, bound(num_partials, INTERPRETED), BLOCK_P):
        partials_P = start + tl.arange(0, BLOCK_P)
        mask_P = partials_P < num_partials
        places_P = ((first_place + partials_P).to(tl.int64) * num_queries + row % num_queries) * num_heads + head
        lse2_P = tl.load(partial_lse2_ptr + places_P, mask=mask_P, other=float("-inf"))
        out_PD = tl.load(
            partial_out_ptr + places_P[:, None] * HEAD_SIZE + channels_D[None, :],
            mask=mask_P[:, None] & in_head_D[None, :],
            other=0.0,
        )
        new_max = tl.maximum(max_lse2, tl.max(lse2_P, 0))
        rescale = tl.exp2(max_lse2 - new_max)
        weights_P = tl.exp2(lse2_P - new_max)
        total = total * rescale + tl.sum(weights_P, 0)
        acc_D = acc_D * rescale + tl.sum(out_PD * weights_P[:, None], 0)
        max_lse2 = new_max
    total = tl.where(max_lse2 == float("-inf"), 1.0, total)
    out_D = acc_D / total
    places_D = row.to(tl.int64) * stride_out_r + head * stride_out_h + channels_D
    tl.store(out_ptr + places_D, out_D.to(out_ptr.dtype.element_ty), mask=in_head_D)
    if lse_ptr is not None:
        tl.store(lse_ptr + head * stride_lse_h + row, (max_lse2 + tl.log2(total)) / _LOG2_E)
