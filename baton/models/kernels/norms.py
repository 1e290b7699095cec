"""RMS norms, optionally fused with the preceding addition to the residual stream, and with the quantization for the
linear layer that follows.

The twins are in `baton.models.layers.norms`. A row's result depends on that row only: the row's size alone decides the
program and the order of the sum. Legend: T tokens, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.rotation import RowNorm
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, allocate, store_quantized
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

# Channels of a row per thread: two loads of 16 bytes of bf16.
_CHANNELS_PER_THREAD = 16


def rms_norm(x_TD: Tensor, norm: RowNorm) -> Tensor:
    """Returns contiguous [T, D]. Rows of `x_TD` may have any stride."""
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    _launch(x_TD, None, None, norm, out_TD)
    return out_TD


def add_rms_norm(stream_TD: Tensor, update_TD: Tensor, norm: RowNorm, *, update_norm: RowNorm | None = None) -> Tensor:
    """Adds `update_TD`, or its norm by `update_norm`, to `stream_TD` in place. Returns `norm` of the sum [T, D].

    Rounds to the tensors' dtype wherever separate calls would: after the update's norm, the sum and the norm.
    """
    out_TD = torch.empty_like(stream_TD, memory_format=torch.contiguous_format)
    _launch(update_TD, stream_TD, update_norm, norm, out_TD)
    return out_TD


def norm_and_quantize(
    stream_TD: Tensor,
    update_TD: Tensor | None,
    norm: RowNorm,
    row_format: RowFormat,
    *,
    update_norm: RowNorm | None = None,
) -> QuantizedRows:
    """Does what `add_rms_norm` does, or `rms_norm` without an update, and quantizes the result, with the bits of
    separate calls."""
    num_tokens, size = stream_TD.shape
    out = allocate(num_tokens, size, row_format, like=stream_TD)
    if update_TD is None:
        _launch(stream_TD, None, None, norm, out.stored_PK, quantized=(out, row_format))
    else:
        _launch(update_TD, stream_TD, update_norm, norm, out.stored_PK, quantized=(out, row_format))
    return out


def norm_warps(size: int) -> int:
    """Returns the number of warps for a row of this size. A norm's last bits depend on it."""
    block: int = triton.next_power_of_2(size)
    return min(max(block // (32 * _CHANNELS_PER_THREAD), 1), 16)


def _launch(
    x_TD: Tensor,
    stream_TD: Tensor | None,
    update_norm: RowNorm | None,
    norm: RowNorm,
    out_PD: Tensor,
    *,
    quantized: tuple[QuantizedRows, RowFormat] | None = None,
) -> None:
    num_tokens, size = x_TD.shape
    rows, row_format = quantized or (None, None)
    _norm[(out_PD.shape[0],)](
        x_TD,
        stream_TD,
        None if update_norm is None else update_norm.weight,
        norm.weight,
        out_PD,
        None if rows is None else rows.scale_PC,
        None if row_format is None else row_format.scale,
        num_tokens,
        x_TD.stride(0),
        0 if stream_TD is None else stream_TD.stride(0),
        0.0 if update_norm is None else update_norm.eps,
        norm.eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        UPDATE_OFFSET=0 if update_norm is None else update_norm.weight_offset,
        OFFSET=norm.weight_offset,
        BLOCKED=row_format is not None and row_format.blocked,
        POWER_OF_TWO=row_format is not None and row_format.power_of_two,
        INTERPRETED=interpreted(),
        **overlap(x_TD.device, rows=num_tokens),
        num_warps=norm_warps(size),
        # NOTE: otherwise the compiler fuses the sum of a thread's first two squares with the product of one of them.
        # Which one depends on what the rest of the kernel does, and a norm's last bits would depend on it too.
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _norm(
    x_ptr,
    stream_ptr,
    update_weight_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    given_scale_ptr,
    num_tokens,
    x_stride,
    stream_stride,
    update_eps,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPDATE_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one row; with pointers of scales quantized, and then zeros from row `num_tokens` on."""
    start_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channels_D = tl.arange(0, BLOCK)
    mask_D = channels_D < SIZE
    # All loads come first: few rows spend most of their time waiting for memory, and so wait only once.
    weight_D = tl.load(weight_ptr + channels_D, mask=mask_D, other=0.0)
    if update_weight_ptr is not None:
        update_weight_D = tl.load(update_weight_ptr + channels_D, mask=mask_D, other=0.0)
    await_predecessors(OVERLAP)
    if scale_ptr is not None:
        mask_D &= row < num_tokens
    x_D = tl.load(x_ptr + row * x_stride + channels_D, mask=mask_D, other=0.0).to(tl.float32)
    if stream_ptr is not None:
        stream_ptrs_D = stream_ptr + row * stream_stride + channels_D
        stream_D = tl.load(stream_ptrs_D, mask=mask_D, other=0.0).to(tl.float32)
    finish_row(
        x_D,
        None if stream_ptr is None else stream_D,
        None if stream_ptr is None else stream_ptrs_D,
        None if update_weight_ptr is None else update_weight_D,
        weight_D,
        mask_D,
        row,
        tl.num_programs(0),
        out_ptr,
        scale_ptr,
        given_scale_ptr,
        update_eps,
        eps,
        x_ptr.dtype.element_ty,
        SIZE,
        BLOCK,
        UPDATE_OFFSET,
        OFFSET,
        BLOCKED,
        POWER_OF_TWO,
        INTERPRETED,
    )


@triton.jit
def finish_row(
    x_D,
    stream_D,
    stream_ptrs_D,
    update_weight_D,
    weight_D,
    mask_D,
    row,
    num_rows,
    out_ptr,
    scale_ptr,
    given_scale_ptr,
    update_eps,
    eps,
    dtype: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    UPDATE_OFFSET: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Adds a loaded update, in float32, to its row of the stream, and stores the sum and its norm.

    Args:
        stream_D, stream_ptrs_D: None: `x_D` is what is normalized.
        update_weight_D: None: the update has no norm of its own.
        num_rows: of quantized rows, with padding.
    """
    if update_weight_D is not None:
        x_D = round_to(_normed(x_D, update_weight_D, update_eps, SIZE, UPDATE_OFFSET), dtype, INTERPRETED)
        x_D = x_D.to(tl.float32)
    if stream_D is not None:
        sum_D = round_to(stream_D + x_D, dtype, INTERPRETED)
        tl.store(stream_ptrs_D, sum_D, mask=mask_D)
        x_D = sum_D.to(tl.float32)
    out_D = round_to(_normed(x_D, weight_D, eps, SIZE, OFFSET), dtype, INTERPRETED)
    if scale_ptr is None:
        tl.store(out_ptr + row * SIZE + tl.arange(0, BLOCK), out_D, mask=mask_D)
    else:
        out_D = tl.where(mask_D, out_D.to(tl.float32), 0.0)
        store_quantized(
            out_D,
            row,
            num_rows,
            0,
            out_ptr,
            scale_ptr,
            given_scale_ptr,
            SIZE,
            BLOCK,
            BLOCKED,
            POWER_OF_TWO,
            INTERPRETED,
        )


@triton.jit
def _normed(x_D, weight_D, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    weight_D = weight_D.to(tl.float32)
    if OFFSET:
        weight_D += OFFSET
    return x_D * tl.rsqrt(tl.sum(x_D * x_D, 0) / SIZE + eps) * weight_D
