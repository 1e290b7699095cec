"""The gates of a delta rule in one launch each. The twins are in `baton.models.layers.recurrent.delta_gates`. Legend:
as there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_NUM_WARPS = 4
_LINEAR_ABOVE = 20.0  # above it softplus(x) is x in float32, as in torch


def log_decays(a_THE: Tensor, log_rates: Tensor, bias_HE: Tensor) -> Tensor:
    """Implements `baton.models.layers.recurrent.delta_gates.log_decays`; rates and biases must be contiguous."""
    return _launch(a_THE, log_rates, bias_HE)


def sigmoids(b_THR: Tensor) -> Tensor:
    """Implements `baton.models.layers.recurrent.delta_gates.correction_rates`."""
    return _launch(b_THR, None, None)


def _launch(x_THE: Tensor, log_rates: Tensor | None, bias_HE: Tensor | None) -> Tensor:
    out_THE = torch.empty(x_THE.shape, dtype=torch.float32, device=x_THE.device)
    total, heads, entries = out_THE.numel(), *x_THE.shape[1:]
    _gates[(triton.cdiv(total, _TILE),)](
        x_THE,
        log_rates,
        bias_HE,
        out_THE,
        total,
        *x_THE.stride(),
        HEADS=heads,
        ENTRIES=entries,
        RATES=0 if log_rates is None else log_rates.numel() // heads,
        LINEAR_ABOVE=_LINEAR_ABOVE,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )
    return out_THE


@triton.jit
def _gates(
    x_ptr,
    log_rates_ptr,
    bias_ptr,
    out_ptr,
    total,
    stride_T,
    stride_H,
    stride_E,
    HEADS: tl.constexpr,
    ENTRIES: tl.constexpr,
    RATES: tl.constexpr,
    LINEAR_ABOVE: tl.constexpr,
    TILE: tl.constexpr,
):
    """RATES: log rates of each head; 0: sigmoids."""
    index_X = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask_X = index_X < total
    entry_X = index_X % ENTRIES
    head_X = index_X // ENTRIES % HEADS
    ptrs_X = x_ptr + index_X // (ENTRIES * HEADS) * stride_T + head_X * stride_H + entry_X * stride_E
    x_X = tl.load(ptrs_X, mask=mask_X, other=0.0).to(tl.float32)
    if RATES:
        x_X += tl.load(bias_ptr + head_X * ENTRIES + entry_X, mask=mask_X, other=0.0)
        rates_X = tl.load(log_rates_ptr + head_X * RATES + entry_X % RATES, mask=mask_X, other=0.0)
        # log(1 + y) loses the digits that 1 + y has lost of a small y; the factor restores them.
        y_X = tl.exp(tl.minimum(x_X, LINEAR_ABOVE))
        sum_X = 1.0 + y_X
        soft_X = tl.where(sum_X == 1.0, y_X, tl.log(sum_X) * (y_X / tl.where(sum_X == 1.0, 1.0, sum_X - 1.0)))
        out_X = -tl.exp(rates_X) * tl.where(x_X > LINEAR_ABOVE, x_X, soft_X)
    else:
        out_X = tl.sigmoid(x_X)
    tl.store(out_ptr + index_X, out_X, mask=mask_X)
