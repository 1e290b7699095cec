"""The gates of a delta rule in one launch each, or in one launch with their projections. The twins are in
`baton.models.layers.recurrent.delta_gates`. Legend: as there, and D hidden channel, R row of the weight, C piece of a
row, P channel of a piece."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

_TILE = 1024
_NUM_WARPS = 4
# Rows of the projection for each program, and what each warp reads of one at once.
_ROWS = 4
_PIECE = 256
# More tokens read the weight too often.
MOST_PROJECTED = 8
_LINEAR_ABOVE = 20.0  # above it softplus(x) is x in float32, as in torch


def log_decays(a_THE: Tensor, log_rates: Tensor, bias_HE: Tensor) -> Tensor:
    """Implements `baton.models.layers.recurrent.delta_gates.log_decays`; rates and biases must be contiguous."""
    return _launch(a_THE, log_rates, bias_HE)


def sigmoids(b_THR: Tensor) -> Tensor:
    """Implements `baton.models.layers.recurrent.delta_gates.correction_rates`."""
    return _launch(b_THR, None, None)


def project(
    x_TD: Tensor, weight_BD: Tensor, log_rates_HR: Tensor, bias_HR: Tensor, *, by_head: bool
) -> tuple[Tensor, Tensor]:
    """Returns (log decays, correction rates), float32 [T, H, R], of at most MOST_PROJECTED tokens.

    Args:
        x_TD: channels contiguous.
        weight_BD: contiguous; 2 * H * R rows: numbers for corrections, then for decays, of each head with `by_head`,
            else of all heads.
    """
    num_tokens, channels = x_TD.shape
    heads, entries = bias_HR.shape
    decays_THR = torch.empty(num_tokens, heads, entries, dtype=torch.float32, device=x_TD.device)
    rates_THR = torch.empty_like(decays_THR)
    _project[(triton.cdiv(len(weight_BD), _ROWS), num_tokens)](
        x_TD,
        weight_BD,
        log_rates_HR,
        bias_HR,
        decays_THR,
        rates_THR,
        x_TD.stride(0),
        GATES=heads * entries,
        RUN=entries if by_head else heads * entries,
        CHANNELS=channels,
        LINEAR_ABOVE=_LINEAR_ABOVE,
        ROWS=_ROWS,
        PIECES=triton.next_power_of_2(triton.cdiv(channels, _PIECE)),
        PIECE=_PIECE,
        INTERPRETED=interpreted(),
        **overlap(x_TD.device, rows=num_tokens),
        num_warps=_ROWS,
    )
    return decays_THR, rates_THR


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
        out_X = -tl.exp(rates_X) * _softplus(x_X, LINEAR_ABOVE)
    else:
        out_X = tl.sigmoid(x_X)
    tl.store(out_ptr + index_X, out_X, mask=mask_X)


@triton.jit
def _softplus(x_X, LINEAR_ABOVE: tl.constexpr):
    # log(1 + y) loses the digits that 1 + y has lost of a small y; the factor restores them.
    y_X = tl.exp(tl.minimum(x_X, LINEAR_ABOVE))
    sum_X = 1.0 + y_X
    soft_X = tl.where(sum_X == 1.0, y_X, tl.log(sum_X) * (y_X / tl.where(sum_X == 1.0, 1.0, sum_X - 1.0)))
    return tl.where(x_X > LINEAR_ABOVE, x_X, soft_X)


@triton.jit
def _project(
    x_ptr,
    weight_ptr,
    log_rates_ptr,
    bias_ptr,
    decays_ptr,
    rates_ptr,
    x_stride,
    GATES: tl.constexpr,
    RUN: tl.constexpr,
    CHANNELS: tl.constexpr,
    LINEAR_ABOVE: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes ROWS gates of one token. Each run of rows is for corrections, the next one for decays."""
    start_dependents(OVERLAP)
    token = tl.program_id(1).to(tl.int64)
    rows_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    has_R = rows_R < 2 * GATES
    at_C1P = tl.arange(0, PIECES)[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]
    has_CRP = has_R[None, :, None] & (at_C1P < CHANNELS)
    weight_CRP = tl.load(weight_ptr + (rows_R * CHANNELS)[None, :, None] + at_C1P, mask=has_CRP, other=0.0)
    is_decay_R = rows_R // RUN % 2 == 1
    gates_R = rows_R // (2 * RUN) * RUN + rows_R % RUN
    log_rate_R = tl.load(log_rates_ptr + gates_R, mask=has_R & is_decay_R, other=0.0)
    bias_R = tl.load(bias_ptr + gates_R, mask=has_R & is_decay_R, other=0.0)
    await_predecessors(OVERLAP)
    # NOTE: x has a row's axis too, so that each warp loads what it multiplies.
    x_ptrs_CRP = x_ptr + token * x_stride + (rows_R * 0)[None, :, None] + at_C1P
    x_CRP = tl.load(x_ptrs_CRP, mask=has_CRP, other=0.0).to(tl.float32)
    sum_R = tl.sum(tl.sum(weight_CRP.to(tl.float32) * x_CRP, 0), 1)
    sum_R = round_to(sum_R, x_ptr.dtype.element_ty, INTERPRETED).to(tl.float32)
    decay_R = -tl.exp(log_rate_R) * _softplus(sum_R + bias_R, LINEAR_ABOVE)
    tl.store(decays_ptr + token * GATES + gates_R, decay_R, mask=has_R & is_decay_R)
    tl.store(rates_ptr + token * GATES + gates_R, tl.sigmoid(sum_R), mask=has_R & (is_decay_R == 0))
