"""The gated norm of recurrent layers' outputs. The twin is in `baton.models.layers.recurrent.gated_norm`. Legend: as
there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

_ROWS = 8  # of one program
_NUM_WARPS = 4


def gated_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, *, eps: float, sigmoid: bool) -> Tensor:
    """Returns contiguous [T, H, V] in the dtype of `x_THV`.

    Args:
        x_THV: contiguous.
        gate_THV: at any strides of tokens and heads, channels side by side.
    """
    tokens, heads, size = x_THV.shape
    out_THV = torch.empty_like(x_THV)
    _gated_norm[(triton.cdiv(tokens * heads, _ROWS),)](
        x_THV,
        gate_THV,
        weight_V,
        out_THV,
        tokens * heads,
        gate_THV.stride(0),
        gate_THV.stride(1),
        eps,
        HEADS=heads,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        ROWS=_ROWS,
        SIGMOID=sigmoid,
        INTERPRETED=interpreted(),
        **overlap(x_THV.device, rows=tokens),
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,  # overlapping or not, one sum
    )
    return out_THV


@triton.jit(do_not_specialize=["num_rows"])  # one kernel for any number of tokens
def _gated_norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    gate_stride_T,
    gate_stride_H,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_dependents(OVERLAP)
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channels_V = tl.arange(0, BLOCK)
    has_V = channels_V < SIZE
    has_RV = (rows_R < num_rows)[:, None] & has_V[None, :]
    x_ptrs_RV = rows_R[:, None] * SIZE + channels_V[None, :]
    gate_rows_R = rows_R // HEADS * gate_stride_T + rows_R % HEADS * gate_stride_H
    weight_V = tl.load(weight_ptr + channels_V, mask=has_V, other=0.0).to(tl.float32)
    await_predecessors(OVERLAP)
    x_RV = tl.load(x_ptr + x_ptrs_RV, mask=has_RV, other=0.0).to(tl.float32)
    gate_RV = tl.load(gate_ptr + gate_rows_R[:, None] + channels_V[None, :], mask=has_RV, other=0.0).to(tl.float32)
    squares_R = tl.sum(x_RV * x_RV, axis=1)
    normed_RV = x_RV * tl.rsqrt(squares_R / SIZE + eps)[:, None] * weight_V[None, :]
    factor_RV = tl.sigmoid(gate_RV)
    if not SIGMOID:
        factor_RV *= gate_RV
    tl.store(out_ptr + x_ptrs_RV, round_to(normed_RV * factor_RV, out_ptr.dtype.element_ty, INTERPRETED), mask=has_RV)
