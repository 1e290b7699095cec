"""The scan of Mamba-2 on a GPU. The twin is in `baton.models.layers.recurrent.selective_scan`, which has the formulas.

A program of decodes and of prompts in order has a tile of one head's state and walks over tokens. A program of other
prompts walks over sub-chunks. What it writes does not depend on other programs. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.snapshots import snapshot_slot
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.kernels.recurrent.token_walk import (
    ANY_ALIGNMENT,
    SAME_FOR_ALL,
    decodes_of,
    first_token,
    load_token,
    next_decode,
    next_kept,
    prompts_in_order,
)
from baton.tritonlib.launch import bound, interpreted
from baton.tritonlib.rounding import round_to

# Tokens of a sub-chunk, at multiples of this of a prompt's positions.
SUB_CHUNK = 64
_TOKEN_CHANNELS, _PROMPT_CHANNELS = 16, 64
_TOKEN_WARPS, _PROMPT_WARPS = 4, 8
_LEAST_OF_DOT = 16
# 16-bit inputs are exact in tf32, while states and what fades lose digits to it: of the terms' sum up to 6e-4, where
# the inputs' own rounding loses 25e-4 in bfloat16, but 3e-4 in float16. In three products tf32 loses none that matter.
_PRECISIONS = {torch.float32: "ieee", torch.bfloat16: "tf32", torch.float16: "tf32x3"}


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
    # NOTE: padding may stand for tokens that are others' here, so programs of padding write nothing.
    out_THP = torch.zeros(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    tensors = (x_THP, dt_TH, b_TGN, c_TGN, *learnt, out_THP, states_SHPN)
    strides = (
        *(x_THP.stride(0), dt_TH.stride(0), b_TGN.stride(0), c_TGN.stride(0)),
        *states_SHPN.stride()[:3],
    )
    constants = {
        "HEADS": heads,
        "PER_GROUP": heads // groups,
        "CHANNELS": channels,
        "NUMBERS": numbers,
        "INTERPRETED": interpreted(),
    }
    num_decodes, num_prompts = min(len(rows.decode_slots_N), num_tokens), len(rows.prompt_slots_P)
    num_prompts = num_prompts if rows.max_prompt_tokens else 0
    block = triton.next_power_of_2(numbers)
    walks = ((num_decodes, decodes_of(rows)), (num_prompts if rows.in_order else 0, prompts_in_order(rows)))
    for num_rows, walk in walks:
        if num_rows:
            tile = min(_TOKEN_CHANNELS, triton.next_power_of_2(channels))
            _token_by_token[(num_rows, heads, triton.cdiv(channels, tile))](
                *tensors,
                *walk,
                *dt_limits,
                *strides,
                **constants,
                TILE_P=tile,
                BLOCK_N=block,
                num_warps=_TOKEN_WARPS,
            )
    if num_prompts and not rows.in_order:
        tile = max(_LEAST_OF_DOT, min(_PROMPT_CHANNELS, triton.next_power_of_2(channels)))
        _prompt[(num_prompts, heads, triton.cdiv(channels, tile))](
            *tensors,
            rows.prompt_slots_P,
            rows.prompt_starts_P1,
            rows.prompt_context_P,
            rows.snapshot_slots_PM,
            rows.snapshot_lens_PM,
            *dt_limits,
            *strides,
            **constants,
            TILE_P=tile,
            BLOCK_N=max(_LEAST_OF_DOT, block),
            TILE_I=SUB_CHUNK,
            SNAPSHOTS=rows.snapshot_slots_PM.shape[1],
            PRECISION=_PRECISIONS[x_THP.dtype],
            num_warps=_PROMPT_WARPS,
            num_stages=1,
        )
    return out_THP


@triton.jit
def _limited(dt, least, most):
    """Softplus of dt, within limits."""
    grown = tl.exp(tl.minimum(dt, 20.0))
    sum = 1.0 + grown
    # A logarithm of the rounded sum loses small numbers; the quotient makes up for the rounding.
    soft = tl.where(sum == 1.0, grown, tl.log(sum) * (grown / tl.maximum(sum - 1.0, 1e-30)))
    soft = tl.where(dt > 20.0, dt, soft)
    return tl.minimum(tl.maximum(soft, least), most)


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
            dt = _limited(given_dt.to(tl.float32) + bias, dt_min, dt_max)
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


@triton.jit
def _prompt(
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
    starts_ptr,
    context_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
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
    INTERPRETED: tl.constexpr,
    TILE_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_I: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All new tokens of one prompt, for TILE_P channels of one head."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + prompt).to(tl.int64)
    start = tl.load(starts_ptr + prompt)
    length = tl.load(starts_ptr + prompt + 1) - start
    context = tl.load(context_ptr + prompt)
    if (slot >= 0) & (length > 0):
        p_P = tl.program_id(2) * TILE_P + tl.arange(0, TILE_P)
        n_N = tl.arange(0, BLOCK_N)
        i_I = tl.arange(0, TILE_I)
        has_P, has_N = p_P < CHANNELS, n_N < NUMBERS
        has_NP = has_N[:, None] & has_P[None, :]
        group = head // PER_GROUP
        decay = -tl.exp(tl.load(log_rate_ptr + head))
        skip, bias = tl.load(skip_ptr + head), tl.load(bias_ptr + head)
        state_ptrs_NP = state_ptr + slot * state_stride_S + head * state_stride_H
        state_ptrs_NP += p_P[None, :] * state_stride_P + n_N[:, None]
        state_NP = tl.load(state_ptrs_NP, mask=has_NP & (context > 0), other=0.0)
        before = context % TILE_I  # tokens of the first sub-chunk that are in the state
        for index in range(bound((before + length + TILE_I - 1) // TILE_I, INTERPRETED)):
            new_I = index * TILE_I - before + i_I  # counts from the first new token
            has_I = (new_I >= 0) & (new_I < length)
            token_I = (start + new_I).to(tl.int64)
            dt_I = tl.load(dt_ptr + token_I * dt_stride + head, mask=has_I, other=0.0).to(tl.float32) + bias
            # Tokens that are not of this step neither fade nor add anything.
            dt_I = tl.where(has_I, _limited(dt_I, dt_min, dt_max), 0.0)
            faded_I = tl.cumsum(dt_I * decay, axis=0)
            faded = tl.sum(dt_I * decay, axis=0)
            in_ptrs_IN = token_I[:, None] * b_stride + group * NUMBERS + n_N[None, :]
            has_IN = has_I[:, None] & has_N[None, :]
            b_IN = tl.load(b_ptr + in_ptrs_IN, mask=has_IN, other=0.0).to(tl.float32)
            in_ptrs_IN = token_I[:, None] * c_stride + group * NUMBERS + n_N[None, :]
            c_IN = tl.load(c_ptr + in_ptrs_IN, mask=has_IN, other=0.0).to(tl.float32)
            has_IP = has_I[:, None] & has_P[None, :]
            x_ptrs_IP = x_ptr + token_I[:, None] * x_stride + head * CHANNELS + p_P[None, :]
            x_IP = tl.load(x_ptrs_IP, mask=has_IP, other=0.0).to(tl.float32)
            taken_IP = x_IP * dt_I[:, None]
            between_II = tl.where(i_I[:, None] >= i_I[None, :], faded_I[:, None] - faded_I[None, :], float("-inf"))
            products_II = tl.dot(c_IN, tl.trans(b_IN), input_precision=PRECISION) * tl.exp(between_II)
            y_IP = tl.dot(products_II, taken_IP, input_precision=PRECISION)
            y_IP += tl.dot(c_IN, state_NP, input_precision=PRECISION) * tl.exp(faded_I)[:, None]
            y_IP += skip * x_IP
            out_ptrs_IP = out_ptr + (token_I[:, None] * HEADS + head) * CHANNELS + p_P[None, :]
            tl.store(out_ptrs_IP, round_to(y_IP, dtype, INTERPRETED), mask=has_IP)
            left_IP = taken_IP * tl.exp(faded - faded_I)[:, None]
            state_NP = state_NP * tl.exp(faded) + tl.dot(tl.trans(b_IN), left_IP, input_precision=PRECISION)
            done = (index + 1) * TILE_I - before
            snapshot = snapshot_slot(snapshot_slots_ptr, snapshot_lens_ptr, prompt, done, SNAPSHOTS).to(tl.int64)
            if snapshot >= 0:
                tl.store(state_ptrs_NP + (snapshot - slot) * state_stride_S, state_NP, mask=has_NP)
        tl.store(state_ptrs_NP, state_NP, mask=has_NP)
