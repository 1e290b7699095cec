"""How results of a request's workers become one: the last worker merges them, or a kernel of its own does.

The order of a merge is the plan's, whoever arrives last, so a row's bits are the same in every run. Legend: R requests,
G query heads of a program, M those and as few others as fill a power of two, P partial results, C blocks of channels, D
channels.
"""

from typing import NamedTuple, Self

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.decode.plan import DecodePlan, units_per_worker
from attention.quantized_output import BLOCK, QuantizedOutput
from baton.tritonlib.fp8 import scales_of, to_fp8
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

_LOG2_E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(BLOCK)
# Numbers of partial results that a warp loads at once.
_MERGED_PER_WARP = 512


class Output(NamedTuple):
    """The kernels' arguments for a result.

    Attributes:
        strides: of rows, of heads, and of the scales' blocks.
        rounded: the dtype before the result is quantized, as Triton's; None: it is not quantized.
    """

    rows: Tensor
    scales: Tensor | None
    strides: tuple[int, int, int]
    rounded: tl.dtype | None
    power_of_two: bool

    @classmethod
    def of(cls, out: Tensor | QuantizedOutput) -> Self:
        if isinstance(out, Tensor):
            return cls(out, None, (out.stride(0), out.stride(1), 0), None, power_of_two=False)
        rows, scales = out.stored_THD, out.scale_CT
        rounded = getattr(tl, str(out.dtype).removeprefix("torch."))
        return cls(rows, scales, (rows.stride(0), rows.stride(1), scales.stride(0)), rounded, out.power_of_two)


def merges_within(num_reqs: int, num_workers: int) -> bool:
    """Whether the last worker of a request merges. Where several share most requests, a kernel of its own is faster,
    because more programs merge; where few requests are shared, its launch costs more than it does."""
    return 2 * num_reqs > num_workers


def merged_at_once(num_heads: int, channels: int, *, num_warps: int) -> int:
    """Returns how many partial results of this shape a worker loads at once."""
    return max(1, min(32, _MERGED_PER_WARP * num_warps // (num_heads * channels)))


def launch_merge(
    plan: DecodePlan, *, queries_per_request: int, sinks_H: Tensor | None, out: Output, lse_HR: Tensor | None
) -> None:
    """Merges the partial results of all requests that several workers shared."""
    num_rows, num_heads, head_size = out.rows.shape
    # In large batches most requests have one worker and the rest few, so few programs suffice.
    many = 4 * num_rows > plan.num_workers
    block_m, block_p = (min(8, triton.next_power_of_2(num_heads)), 4) if many else (1, 32)
    _merge_kernel[(triton.cdiv(num_heads, block_m), num_rows)](
        plan.partials.out,
        plan.partials.lse2,
        plan.unit_starts,
        sinks_H,
        out.rows,
        out.scales,
        lse_HR,
        num_rows // queries_per_request,
        plan.num_workers,
        num_heads,
        queries_per_request,
        *out.strides,
        0 if lse_HR is None else lse_HR.stride(0),
        HEAD_SIZE=head_size,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        BLOCK_M=block_m,
        BLOCK_P=block_p,
        ROUNDED=out.rounded,
        POWER_OF_TWO=out.power_of_two,
        INTERPRETED=interpreted(),
        **overlap(out.rows.device, rows=num_rows),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_workers", "stride_scale", "stride_lse_h"])
def _merge_kernel(
    partial_out_ptr,
    partial_lse2_ptr,
    unit_starts_ptr,
    sinks_ptr,
    out_ptr,
    out_scale_ptr,
    lse_ptr,
    num_reqs,
    num_workers,
    num_heads,
    num_queries,
    stride_out_r,
    stride_out_h,
    stride_scale,
    stride_lse_h,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
    ROUNDED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges BLOCK_M heads of one query."""
    start_dependents(OVERLAP)
    row = tl.program_id(1)
    request = row // num_queries
    first_unit = tl.load(unit_starts_ptr + request)
    last_unit = tl.load(unit_starts_ptr + request + 1)
    share = units_per_worker(tl.load(unit_starts_ptr + num_reqs), num_workers)
    first_worker = first_unit // share
    num_partials = (last_unit - 1) // share - first_worker + 1
    await_predecessors(OVERLAP)
    if num_partials == 1:  # the only worker has written the result
        return

    heads_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    queries_M, exists_M = row % num_queries + tl.zeros_like(heads_M), heads_M < num_heads
    out_MD, lse2_M = merge_partials(
        request + first_worker, num_partials, queries_M, heads_M, exists_M,
        partial_out_ptr, partial_lse2_ptr, sinks_ptr, num_queries, num_heads,
        HEAD_SIZE, BLOCK_D, BLOCK_P, INTERPRETED,
    )  # fmt: skip
    store_result(
        out_MD, lse2_M, row.to(tl.int64) + tl.zeros_like(heads_M), heads_M, exists_M,
        out_ptr, out_scale_ptr, lse_ptr, stride_out_r, stride_out_h, stride_scale, stride_lse_h,
        HEAD_SIZE, ROUNDED, POWER_OF_TWO, INTERPRETED,
    )  # fmt: skip


@triton.jit
def store_partial(
    out_GD,
    lse2_G,
    place,
    queries_G,
    heads_G,
    mask_G,
    partial_out_ptr,
    partial_lse2_ptr,
    num_queries,
    num_heads,
    HEAD_SIZE: tl.constexpr,
):
    """Stores a worker's result of a request."""
    channels_D = tl.arange(0, out_GD.shape[1])
    places_G = (place.to(tl.int64) * num_queries + queries_G) * num_heads + heads_G
    mask_GD = mask_G[:, None] & (channels_D < HEAD_SIZE)[None, :]
    tl.store(partial_out_ptr + places_G[:, None] * HEAD_SIZE + channels_D[None, :], out_GD, mask=mask_GD)
    tl.store(partial_lse2_ptr + places_G, lse2_G, mask=mask_G)


@triton.jit
def merge_partials(
    first_place,
    num_partials,
    queries_M,
    heads_M,
    mask_M,
    partial_out_ptr,
    partial_lse2_ptr,
    sinks_ptr,
    num_queries,
    num_heads,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merges the partial results of a request, in order. Returns the results and the binary logarithms of the sums of
    exponentials."""
    channels_D = tl.arange(0, BLOCK_D)
    in_head_D = channels_D < HEAD_SIZE
    acc_MD = tl.zeros([heads_M.shape[0], BLOCK_D], tl.float32)
    max_M = tl.full([heads_M.shape[0]], float("-inf"), tl.float32)
    total_M = tl.zeros([heads_M.shape[0]], tl.float32)
    if sinks_ptr is not None:
        max_M = tl.load(sinks_ptr + heads_M, mask=mask_M, other=0.0).to(tl.float32) * _LOG2_E
        total_M += 1.0
    for start in tl.range(0, bound(num_partials, INTERPRETED), BLOCK_P):
        partials_P = start + tl.arange(0, BLOCK_P)
        rows_PM = (first_place + partials_P).to(tl.int64)[:, None] * num_queries + queries_M[None, :]
        places_PM = rows_PM * num_heads + heads_M[None, :]
        mask_PM = (partials_P < num_partials)[:, None] & mask_M[None, :]
        # Past L1, which may hold what was there before the other workers stored theirs.
        lse2_PM = tl.load(partial_lse2_ptr + places_PM, mask=mask_PM, other=float("-inf"), cache_modifier=".cg")
        out_PMD = tl.load(
            partial_out_ptr + places_PM[:, :, None] * HEAD_SIZE + channels_D[None, None, :],
            mask=mask_PM[:, :, None] & in_head_D[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # Heads past the last have no partial results, and -inf minus -inf is NaN.
        new_max_M = tl.where(mask_M, tl.maximum(max_M, tl.max(lse2_PM, 0)), 0.0)
        rescale_M = tl.exp2(max_M - new_max_M)
        weights_PM = tl.exp2(lse2_PM - new_max_M[None, :])
        total_M = total_M * rescale_M + tl.sum(weights_PM, 0)
        acc_MD = acc_MD * rescale_M[:, None] + tl.sum(out_PMD * weights_PM[:, :, None], 0)
        max_M = new_max_M
    total_M = tl.where(mask_M, total_M, 1.0)
    return acc_MD / total_M[:, None], max_M + tl.log2(total_M)


@triton.jit
def store_result(
    out_GD,
    lse2_G,
    rows_G,
    heads_G,
    mask_G,
    out_ptr,
    scale_ptr,
    lse_ptr,
    stride_out_r,
    stride_out_h,
    stride_scale,
    stride_lse_h,
    HEAD_SIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Stores a result, and its log-sum-exp if asked for. With scales it is rounded to the dtype ROUNDED and then
    quantized, as two kernels would do."""
    HEADS: tl.constexpr = out_GD.shape[0]
    CHANNELS: tl.constexpr = out_GD.shape[1]
    channels_D = tl.arange(0, CHANNELS)
    places_GD = (rows_G * stride_out_r + heads_G * stride_out_h)[:, None] + channels_D[None, :]
    mask_GD = mask_G[:, None] & (channels_D < HEAD_SIZE)[None, :]
    if scale_ptr is None:
        tl.store(out_ptr + places_GD, round_to(out_GD, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_GD)
    else:
        COLUMNS: tl.constexpr = HEAD_SIZE // _BLOCK
        rounded_GD = round_to(out_GD, ROUNDED, INTERPRETED).to(tl.float32)
        rounded_GCB = tl.reshape(rounded_GD, [HEADS, COLUMNS, _BLOCK])
        scale_GC, inverse_GC = scales_of(tl.max(tl.abs(rounded_GCB), 2), POWER_OF_TWO)
        stored_GD = tl.reshape(
            to_fp8(rounded_GCB * inverse_GC[:, :, None], tl.float8e4nv, INTERPRETED), places_GD.shape
        )
        tl.store(out_ptr + places_GD, stored_GD, mask=mask_GD)
        columns_GC = (heads_G * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
        tl.store(scale_ptr + columns_GC.to(tl.int64) * stride_scale + rows_G[:, None], scale_GC, mask=mask_G[:, None])
    if lse_ptr is not None:
        tl.store(lse_ptr + heads_G * stride_lse_h + rows_G, lse2_G / _LOG2_E, mask=mask_G)
