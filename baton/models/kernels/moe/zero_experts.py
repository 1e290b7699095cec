"""Computes the contribution of experts without weights: the token's own row, times the sum of its weights for them.

The twin is in `baton.models.layers.moe.moe`. Legend: T token, K choice of a token, D hidden channel.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

_TILE = 2048
_NUM_WARPS = 4


def given_back(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, *, first: int) -> Tensor:
    """Returns [T, D] in the dtype of x, rounded once. Weights are added up in the order of the choices, in any batch.

    Args:
        x_TD: rows at any stride.
        weights_TK: float32, contiguous.
        experts_TK: of any integer type, contiguous; those from `first` on have no weights.
    """
    num_tokens, channels = x_TD.shape
    out_TD = x_TD.new_empty(num_tokens, channels)
    if not num_tokens:
        return out_TD
    _given_back[(num_tokens, triton.cdiv(channels, _TILE))](
        x_TD,
        weights_TK,
        experts_TK,
        out_TD,
        first,
        x_TD.stride(0),
        CHOICES=experts_TK.shape[1],
        CHANNELS=channels,
        TILE=_TILE,
        INTERPRETED=interpreted(),
        **overlap(x_TD.device, rows=num_tokens),
        num_warps=_NUM_WARPS,
    )
    return out_TD


@triton.jit
def _given_back(
    x_ptr,
    weights_ptr,
    experts_ptr,
    out_ptr,
    first,
    x_stride,
    CHOICES: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes one tile of one token."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels_D = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists_D = channels_D < CHANNELS
    share = 0.0
    for nth in tl.static_range(CHOICES):
        is_zero = tl.load(experts_ptr + token * CHOICES + nth) >= first
        share += tl.where(is_zero, tl.load(weights_ptr + token * CHOICES + nth), 0.0)
    x_D = tl.load(x_ptr + token * x_stride + channels_D, mask=exists_D, other=0.0).to(tl.float32)
    out_D = round_to(x_D * share, out_ptr.dtype.element_ty, INTERPRETED)
    tl.store(out_ptr + token * CHANNELS + channels_D, out_D, mask=exists_D)
