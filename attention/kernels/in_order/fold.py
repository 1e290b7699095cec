"""The fold of partial results: those of a row's units are added one after another, in order, in both kinds of programs.

Legend: G query rows, P partial results of a request, D channels. Matrices are [D, G] or [G, D], as in
`attention.kernels.in_order.tile`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.plan import DecodePlan
from attention.kernels.in_order.tile import LOG2_E
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents


class Folded(NamedTuple):
    """Weighted values of some partial results, the largest binary log-sum-exp and the sum of weights of each row."""

    acc: tl.tensor
    max_lse2_G: tl.tensor
    total_G: tl.tensor


@triton.jit
def no_partials(acc, sinks_ptr, heads_G, mask_G):
    """Returns the fold of no partial result.

    Args:
        acc: zeros.
    """
    max_lse2_G = tl.full(heads_G.shape, float("-inf"), tl.float32)
    total_G = tl.zeros(heads_G.shape, tl.float32)
    if sinks_ptr is not None:
        max_lse2_G = tl.load(sinks_ptr + heads_G, mask=mask_G, other=0.0).to(tl.float32) * LOG2_E
        total_G += 1.0
    return Folded(acc, max_lse2_G, total_G)


@triton.jit
def fold(folded, out, lse2_G, AXIS: tl.constexpr):
    """Adds one partial result. The compiler has no choice of what to round, so that the bits are equal wherever this is
    done. A partial result without keys, whose log-sum-exp is -inf, changes no bit.

    Args:
        AXIS: of the channels.
    """
    max_lse2_G = tl.maximum(folded.max_lse2_G, lse2_G)
    safe_max_G = tl.where(max_lse2_G == float("-inf"), 0.0, max_lse2_G)
    rescale_G, weight_G = tl.exp2(folded.max_lse2_G - safe_max_G), tl.exp2(lse2_G - safe_max_G)
    total_G = tl.fma(folded.total_G, rescale_G, weight_G)
    rescale = tl.broadcast_to(tl.expand_dims(rescale_G, AXIS), out.shape)
    acc = tl.fma(folded.acc, rescale, out * tl.expand_dims(weight_G, AXIS))
    return Folded(acc, max_lse2_G, total_G)


@triton.jit
def result(folded, AXIS: tl.constexpr):
    """Returns the weighted mean of all values; 0 for a row without keys."""
    total_G = tl.where(folded.total_G == 0.0, 1.0, folded.total_G)
    return folded.acc / tl.expand_dims(total_G, AXIS)


def fold_partials(plan: DecodePlan, *, sinks_H: Tensor | None, out: Tensor) -> None:
    """Writes the results of decodes that have several units and of those without keys; the units wrote the others."""
    num_reqs, num_heads, head_size = out.shape
    _fold_kernel[(num_heads, num_reqs)](
        plan.partials.out,
        plan.partials.lse2,
        plan.unit_starts,
        sinks_H,
        out,
        out.stride(0),
        out.stride(1),
        HEAD_SIZE=head_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        INTERPRETED=interpreted(),
        **overlap(out.device, rows=num_reqs),
        num_warps=4,
    )


@triton.jit
def _fold_kernel(
    partial_out_ptr,
    partial_lse2_ptr,
    unit_starts_ptr,
    sinks_ptr,
    out_ptr,
    stride_out_r,
    stride_out_h,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Folds the partial results of one head of one request."""
    start_dependents(OVERLAP)
    num_heads = tl.num_programs(0)
    request = tl.program_id(1)
    first_unit = tl.load(unit_starts_ptr + request)
    last_unit = tl.load(unit_starts_ptr + request + 1)
    await_predecessors(OVERLAP)
    if last_unit - first_unit == 1:  # its only unit has written the result
        return

    head_G = tl.program_id(0) + tl.arange(0, 1)
    channels_D = tl.arange(0, BLOCK_D)
    mask_GD = (channels_D < HEAD_SIZE)[None, :]
    folded = no_partials(tl.zeros([1, BLOCK_D], tl.float32), sinks_ptr, head_G, head_G < num_heads)
    for unit in tl.range(bound(first_unit, INTERPRETED), bound(last_unit, INTERPRETED), num_stages=4):
        place_G = tl.cast(unit, tl.int64) * num_heads + head_G
        lse2_G = tl.load(partial_lse2_ptr + place_G)
        out_GD = tl.load(partial_out_ptr + place_G[:, None] * HEAD_SIZE + channels_D[None, :], mask=mask_GD, other=0.0)
        folded = fold(folded, out_GD, lse2_G, 1)
    places_GD = request.to(tl.int64) * stride_out_r + head_G[:, None] * stride_out_h + channels_D[None, :]
    tl.store(out_ptr + places_GD, result(folded, 1).to(out_ptr.dtype.element_ty), mask=mask_GD)
