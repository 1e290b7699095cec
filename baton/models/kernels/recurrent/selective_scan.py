"""The scan of Mamba-2 on a GPU, token by token: decodes, and prompts in order. `selective_scan_chunks` has others.

A program has a tile of one head's state and walks over tokens. What it writes does not depend on other programs. The
twin is in `baton.models.layers.recurrent.selective_scan`, which has the formulas. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.selective_scan_chunks import limited_step, prompts
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.kernels.recurrent.token_walk import (
    ANY_ALIGNMENT,
    SAME_FOR_ALL,
    decodes_of,
    first_token,
    load_token,
    next_decode,
    next_kept,
    prefetch_token,
    prompts_in_order,
)
from baton.tritonlib.launch import interpreted
from baton.tritonlib.rounding import round_to

# A program of one warp sums without barriers: with 4 warps a prompt takes 26 % longer, and decodes as long.
_TILE_P = 16
_NUM_WARPS = 1
# Tokens of a prompt that are on their way from memory to L2.
_AHEAD = 16


def selective_scan(
    x_THP: Tensor,
    dt_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    learnt: tuple[Tensor, Tensor, Tensor],
    dt_limits: tuple[float, float],
    states_SHPN: Tensor,
    rows: StateRows,
) -> Tensor:
    """Implements `baton.models.layers.recurrent.selective_scan.selective_scan`; tokens of no request get zeros.

    Args:
        learnt: logarithm of the rate, skip and bias of dt, [H] each.
    """
    num_tokens, heads, channels = x_THP.shape
    groups, numbers = b_TGN.shape[1:]
    num_decodes, num_prompts = min(len(rows.decode_slots_N), num_tokens), len(rows.prompt_slots_P)
    num_prompts = num_prompts if rows.max_prompt_tokens else 0
    by_chunks = num_prompts > 0 and not rows.in_order
    out_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    # Padding of decodes may stand where tokens of prompts are. Prompts' programs write zeros after the last prompt.
    (out_THP[:num_decodes] if by_chunks else out_THP).zero_()
    tensors = (x_THP, dt_TH, b_TGN, c_TGN, *learnt, out_THP, states_SHPN)
    walks = ((num_decodes, decodes_of(rows)), (num_prompts if rows.in_order else 0, prompts_in_order(rows)))
    for num_rows, walk in walks:
        if num_rows:
            tile = min(_TILE_P, triton.next_power_of_2(channels))
            _token_by_token[(num_rows, heads, triton.cdiv(channels, tile))](
                *tensors,
                *walk,
                *dt_limits,
                *(x_THP.stride(0), dt_TH.stride(0), b_TGN.stride(0), c_TGN.stride(0)),
                *states_SHPN.stride()[:3],
                HEADS=heads,
                PER_GROUP=heads // groups,
                CHANNELS=channels,
                NUMBERS=numbers,
                AHEAD=0 if interpreted() else _AHEAD,
                INTERPRETED=interpreted(),
                TILE_P=tile,
                BLOCK_N=triton.next_power_of_2(numbers),
                num_warps=_NUM_WARPS,
            )
    if by_chunks:
        prompts(*tensors, dt_limits, rows)
    return out_THP


@triton.jit(do_not_specialize=SAME_FOR_ALL, do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _token_by_token(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    log_rate_ptr,
    skip_ptr,
    bias_ptr,
    out_ptr,
    state_ptr,
    slots_ptr,
    lens_ptr,
    starts_ptr,
    next_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
    in_prompts,
    has_next,
    num_snapshots,
    dt_min,
    dt_max,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    state_stride_S,
    state_stride_H,
    state_stride_P,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    NUMBERS: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    TILE_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tokens of a row, for TILE_P channels of one head; the state stays in registers."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first, stop, context, slot = first_token(row, slots_ptr, lens_ptr, starts_ptr, in_prompts)
    if (slot >= 0) & (first < stop):
        p_P = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
        n_N = tl.arange(0, BLOCK_N)
        has_P, has_N = p_P < CHANNELS, n_N < NUMBERS
        has_PN = has_P[:, None] & has_N[None, :]
        group = head // PER_GROUP
        bias = tl.load(bias_ptr + head)
        rate = tl.exp(tl.load(log_rate_ptr + head))
        skip = tl.load(skip_ptr + head)
        ptrs_PN = state_ptr + head * state_stride_H + p_P[:, None] * state_stride_P + n_N[None, :]
        state_PN = tl.load(ptrs_PN + slot * state_stride_S, mask=has_PN & (context > 0), other=0.0)
        kept_stop, kept_slot = next_kept(
            row, snapshot_slots_ptr, snapshot_lens_ptr, first, first, stop, slot, num_snapshots
        )
        token = first + 0
        dt_ptr += head
        x_ptrs = x_ptr + head * CHANNELS + tl.program_id(2) * TILE_P
        x_ptrs_P = x_ptr + head * CHANNELS + p_P
        b_ptrs_N, c_ptrs_N = b_ptr + group * NUMBERS + n_N, c_ptr + group * NUMBERS + n_N
        given_dt = load_token(dt_ptr, first, dt_stride, first >= 0)
        given_x_P = load_token(x_ptrs_P, first, x_stride, has_P)
        given_b_N = load_token(b_ptrs_N, first, b_stride, has_N)
        given_c_N = load_token(c_ptrs_N, first, c_stride, has_N)
        while token >= 0:
            # The next token is loaded while this one is computed.
            ahead = token + 1
            goes_on = ahead < stop
            ahead_dt = load_token(dt_ptr, ahead, dt_stride, goes_on)
            ahead_x_P = load_token(x_ptrs_P, ahead, x_stride, has_P & goes_on)
            ahead_b_N = load_token(b_ptrs_N, ahead, b_stride, has_N & goes_on)
            ahead_c_N = load_token(c_ptrs_N, ahead, c_stride, has_N & goes_on)
            prefetch_token(dt_ptr, token, stop, dt_stride, 1, AHEAD)
            prefetch_token(x_ptrs, token, stop, x_stride, TILE_P, AHEAD)
            prefetch_token(b_ptr + group * NUMBERS, token, stop, b_stride, BLOCK_N, AHEAD)
            prefetch_token(c_ptr + group * NUMBERS, token, stop, c_stride, BLOCK_N, AHEAD)
            dt = limited_step(given_dt.to(tl.float32) + bias, dt_min, dt_max)
            fade = tl.exp(-dt * rate)
            x_P = given_x_P.to(tl.float32)
            state_PN = state_PN * fade + (dt * x_P)[:, None] * given_b_N.to(tl.float32)[None, :]
            y_P = tl.sum(state_PN * given_c_N.to(tl.float32)[None, :], axis=1) + skip * x_P
            out_ptrs_P = out_ptr + (token * HEADS + head) * CHANNELS + p_P
            tl.store(out_ptrs_P, round_to(y_P, dtype, INTERPRETED), mask=has_P)
            token += 1
            if token == kept_stop:
                tl.store(ptrs_PN + kept_slot * state_stride_S, state_PN, mask=has_PN)
                if token < stop:
                    kept_stop, kept_slot = next_kept(
                        row, snapshot_slots_ptr, snapshot_lens_ptr, first, token, stop, slot, num_snapshots
                    )
                else:
                    token, kept_slot = next_decode(next_ptr, slots_ptr, token - 1, has_next)
                    stop, kept_stop = token + 1, token + 1
                    goes_on = token >= 0
                    ahead_dt = load_token(dt_ptr, token, dt_stride, goes_on)
                    ahead_x_P = load_token(x_ptrs_P, token, x_stride, has_P & goes_on)
                    ahead_b_N = load_token(b_ptrs_N, token, b_stride, has_N & goes_on)
                    ahead_c_N = load_token(c_ptrs_N, token, c_stride, has_N & goes_on)
            given_dt, given_x_P, given_b_N, given_c_N = ahead_dt, ahead_x_P, ahead_b_N, ahead_c_N
