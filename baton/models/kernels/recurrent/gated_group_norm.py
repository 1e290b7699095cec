"""The gated norm by groups on a GPU. The twin is in `baton.models.layers.recurrent.gated_group_norm`, with the
legend."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import interpreted
from baton.tritonlib.rounding import round_to

_CHANNELS_PER_WARP = 512
_MOST_WARPS = 16


def gated_group_norm(x_TX: Tensor, gate_TX: Tensor, weight_X: Tensor, *, num_groups: int, eps: float) -> Tensor:
    """Returns [T, X] in the dtype of x."""
    num_tokens, size = x_TX.shape
    out_TX = torch.empty(x_TX.shape, dtype=x_TX.dtype, device=x_TX.device)
    block = triton.next_power_of_2(size // num_groups)
    if num_tokens:
        _norm[(num_tokens, num_groups)](
            x_TX,
            gate_TX,
            weight_X,
            out_TX,
            eps,
            x_TX.stride(0),
            gate_TX.stride(0),
            CHANNELS=size // num_groups,
            BLOCK_C=block,
            INTERPRETED=interpreted(),
            num_warps=min(_MOST_WARPS, max(1, block // _CHANNELS_PER_WARP)),
        )
    return out_TX


@triton.jit
def _norm(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    x_stride,
    gate_stride,
    CHANNELS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One group of one token."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, BLOCK_C)
    has_C = c_C < CHANNELS
    channel_C = tl.program_id(1) * CHANNELS + c_C
    x_C = tl.load(x_ptr + token * x_stride + channel_C, mask=has_C, other=0.0).to(tl.float32)
    gate_C = tl.load(gate_ptr + token * gate_stride + channel_C, mask=has_C, other=0.0).to(tl.float32)
    weight_C = tl.load(weight_ptr + channel_C, mask=has_C, other=0.0).to(tl.float32)
    gated_C = x_C * (gate_C / (1.0 + tl.exp(-gate_C)))
    normed_C = gated_C / tl.sqrt(tl.sum(gated_C * gated_C, axis=0) / CHANNELS + eps) * weight_C
    size = tl.num_programs(1) * CHANNELS
    tl.store(out_ptr + token * size + channel_C, round_to(normed_C, dtype, INTERPRETED), mask=has_C)
