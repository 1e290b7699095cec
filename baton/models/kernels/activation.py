"""The activation of gated MLPs: f(gate) * up. It rounds f(gate) to the tensor's dtype, as two calls would. It may be
fused with the quantization for the linear layer that follows.

The twins are in `baton.models.layers.mlp`. Legend: T rows, I channels of the gate, which the up's follow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, allocate, quantize, store_quantized
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

# Channels of gate and of up that one program reads: twice 16 bytes of bf16 of each per thread.
_TILE = 2048
_NUM_WARPS = 4
# Channels of a whole row in one program: 64 of gate and of up in each thread of 16 warps. Compiled for an H200, 28672
# channels take 123 of a thread's 128 registers.
_MOST_CHANNELS = 32768
_CHANNELS_PER_WARP = 512


def silu_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """Returns silu(gate) * up [T, I] of [T, 2 I] with rows at any stride."""
    return _launch(gate_up_TI, tanh_gelu=False)


def gelu_tanh_and_multiply(gate_up_TI: Tensor) -> Tensor:
    """Returns gelu(gate), approximated by tanh, * up [T, I] of [T, 2 I] with rows at any stride."""
    return _launch(gate_up_TI, tanh_gelu=True)


def clamp_and_gate(gate_up_TI: Tensor, *, limit: float, alpha: float) -> Tensor:
    """Returns gate * sigmoid(alpha * gate) * (up + 1) [T, I] of contiguous [T, 2 I] with gate and up in turns. The gate
    is clamped to at most `limit` and up to between -limit and limit. Rounds once."""
    num_rows, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(num_rows, size)
    _clamp_and_gate[(num_rows, triton.cdiv(size, _TILE))](
        gate_up_TI,
        out_TI,
        limit,
        alpha,
        SIZE=size,
        TILE=_TILE,
        INTERPRETED=interpreted(),
        **overlap(gate_up_TI.device, rows=num_rows),
        num_warps=_NUM_WARPS,
    )
    return out_TI


def multiply_by_sigmoid(x_THC: Tensor, gate_THC: Tensor) -> Tensor:
    """Returns x * sigmoid(gate), contiguous. Rounds the sigmoid to the gate's dtype, as two calls would.

    Args:
        x_THC: contiguous.
        gate_THC: tokens and heads at any stride, channels contiguous.
    """
    num_tokens, heads, channels = x_THC.shape
    out_THC = torch.empty_like(x_THC)
    _multiply_by_sigmoid[(num_tokens, triton.cdiv(heads * channels, _TILE))](
        x_THC,
        gate_THC,
        out_THC,
        *gate_THC.stride()[:2],
        HEADS=heads,
        CHANNELS=channels,
        TILE=_TILE,
        INTERPRETED=interpreted(),
        **overlap(x_THC.device, rows=num_tokens),
        num_warps=_NUM_WARPS,
    )
    return out_THC


def activate_and_quantize(gate_up_TI: Tensor, row_format: RowFormat, *, tanh_gelu: bool) -> QuantizedRows:
    """Does what `silu_and_multiply` or `gelu_tanh_and_multiply` does, and quantizes the result, with the bits of
    separate calls."""
    num_rows, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    tile = _TILE
    if row_format.needs_whole_rows:
        if size > _MOST_CHANNELS:
            return quantize(_launch(gate_up_TI, tanh_gelu=tanh_gelu), row_format)
        tile = triton.next_power_of_2(size)
    out = allocate(num_rows, size, row_format, like=gate_up_TI)
    _activate[(out.stored_PK.shape[0], triton.cdiv(size, tile))](
        gate_up_TI,
        out.stored_PK,
        out.scale_PC,
        row_format.scale,
        num_rows,
        gate_up_TI.stride(0),
        SIZE=size,
        TILE=tile,
        TANH_GELU=tanh_gelu,
        BLOCKED=row_format.blocked,
        POWER_OF_TWO=row_format.power_of_two,
        INTERPRETED=interpreted(),
        **overlap(gate_up_TI.device, rows=num_rows),
        num_warps=min(max(tile // _CHANNELS_PER_WARP, 1), 16),
    )
    return out


def _launch(gate_up_TI: Tensor, *, tanh_gelu: bool) -> Tensor:
    num_rows, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
    out_TI = gate_up_TI.new_empty(num_rows, size)
    _activate[(num_rows, triton.cdiv(size, _TILE))](
        gate_up_TI,
        out_TI,
        None,
        None,
        num_rows,
        gate_up_TI.stride(0),
        SIZE=size,
        TILE=_TILE,
        TANH_GELU=tanh_gelu,
        BLOCKED=False,
        POWER_OF_TWO=False,
        INTERPRETED=interpreted(),
        **overlap(gate_up_TI.device, rows=num_rows),
        num_warps=_NUM_WARPS,
    )
    return out_TI


@triton.jit(do_not_specialize=["num_rows"])
def _activate(
    gate_up_ptr,
    out_ptr,
    scale_ptr,
    given_scale_ptr,
    num_rows,
    stride_T,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TANH_GELU: tl.constexpr,
    BLOCKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes TILE channels of one row; with pointers of scales quantized, and then zeros from row `num_rows` on."""
    start_dependents(OVERLAP)
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    channels_I = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask_I = channels_I < SIZE
    if scale_ptr is not None:
        mask_I &= row < num_rows
    await_predecessors(OVERLAP)
    gate_I = tl.load(gate_up_ptr + row * stride_T + channels_I, mask=mask_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_up_ptr + row * stride_T + SIZE + channels_I, mask=mask_I, other=0.0).to(tl.float32)
    if TANH_GELU:
        # 0.5 (1 + tanh(y)) is the sigmoid of 2 y, which loses no digits where tanh is near -1.
        y_I = 0.7978845608028654 * (gate_I + 0.044715 * gate_I * gate_I * gate_I)
        gated_I = gate_I * tl.sigmoid(2.0 * y_I)
    else:
        gated_I = gate_I * tl.sigmoid(gate_I)
    gated_I = round_to(gated_I, dtype, INTERPRETED).to(tl.float32)
    out_I = round_to(gated_I * up_I, dtype, INTERPRETED)
    if scale_ptr is None:
        tl.store(out_ptr + row * SIZE + channels_I, out_I, mask=mask_I)
    else:
        first = tl.program_id(1) * TILE
        store_quantized(
            out_I.to(tl.float32),
            row,
            tl.num_programs(0),
            first,
            out_ptr,
            scale_ptr,
            given_scale_ptr,
            SIZE,
            TILE,
            BLOCKED,
            POWER_OF_TWO,
            INTERPRETED,
        )


@triton.jit
def _clamp_and_gate(
    gate_up_ptr,
    out_ptr,
    limit,
    alpha,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes TILE channels of one row."""
    start_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    channels_I = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask_I = channels_I < SIZE
    pairs_I = gate_up_ptr + row * (2 * SIZE) + 2 * channels_I
    await_predecessors(OVERLAP)
    gate_I = tl.minimum(tl.load(pairs_I, mask=mask_I, other=0.0).to(tl.float32), limit)
    up_I = tl.load(pairs_I + 1, mask=mask_I, other=0.0).to(tl.float32)
    up_I = tl.minimum(tl.maximum(up_I, -limit), limit)
    gated_I = gate_I * tl.sigmoid(alpha * gate_I) * (up_I + 1.0)
    tl.store(out_ptr + row * SIZE + channels_I, round_to(gated_I, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_I)


@triton.jit
def _multiply_by_sigmoid(
    x_ptr,
    gate_ptr,
    out_ptr,
    gate_stride_T,
    gate_stride_H,
    HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes TILE numbers of one token."""
    start_dependents(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    at_X = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask_X = at_X < HEADS * CHANNELS
    gate_ptrs_X = gate_ptr + token * gate_stride_T + at_X // CHANNELS * gate_stride_H + at_X % CHANNELS
    await_predecessors(OVERLAP)
    gate_X = tl.sigmoid(tl.load(gate_ptrs_X, mask=mask_X, other=0.0).to(tl.float32))
    gate_X = round_to(gate_X, gate_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
    row = token * (HEADS * CHANNELS)
    x_X = tl.load(x_ptr + row + at_X, mask=mask_X, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at_X, round_to(x_X * gate_X, out_ptr.dtype.element_ty, INTERPRETED), mask=mask_X)
