"""The gated delta rule on a GPU, token by token: decodes, and prompts in order. `gated_delta_chunks` has other prompts.

Decodes and prompts in order run one compiled kernel, because two that differ in a constant may differ in last bits. The
twin is in `baton.models.layers.recurrent.gated_delta`. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.gated_delta_chunks import prompts
from baton.models.kernels.recurrent.state_rows import StateRows
from baton.models.kernels.recurrent.token_walk import (
    ANY_ALIGNMENT,
    SAME_FOR_ALL,
    TokenWalk,
    decodes_of,
    first_token,
    load_token,
    next_decode,
    next_kept,
    prefetch_token,
    prompts_in_order,
)
from baton.tritonlib.launch import await_predecessors, interpreted, overlap_alike, start_dependents
from baton.tritonlib.rounding import round_to

# Values of one program: 64 numbers of the state for each thread at 128 key channels. With 4 warps a prompt takes 20 %
# longer; half as many values of one warp are faster for prompts, and 1.7 times as slow for 256 decodes.
_TILE_V = 32
_NUM_WARPS = 2
# Tokens of a prompt that are on their way from memory to L2.
_AHEAD = 16


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    states_SHRKV: Tensor,
    rows: StateRows,
) -> Tensor:
    """Implements `baton.models.layers.recurrent.gated_delta.gated_delta`."""
    num_decodes, num_prompts = min(len(rows.decode_slots_N), len(v_THRV)), len(rows.prompt_slots_P)
    has_prompts = num_prompts > 0 and rows.max_prompt_tokens > 0
    by_chunks = has_prompts and not rows.in_order
    # Without prompts every token has a row of its own, whose program writes zeros if the row is padding.
    only_decodes = num_decodes == len(v_THRV) and not has_prompts
    out_THRV = torch.empty_like(v_THRV, memory_format=torch.contiguous_format)
    if not only_decodes:
        # Padding of decodes may stand where tokens of prompts are. Prompts' programs write zeros after the last prompt.
        (out_THRV[:num_decodes] if by_chunks else out_THRV).zero_()
    operands = (q_THK, k_THK, v_THRV, log_decay.contiguous(), beta_THR.contiguous(), out_THRV, states_SHRKV)
    if num_decodes:
        options = overlap_alike(v_THRV.device, rows=num_decodes)
        _token_by_token(*operands, decodes_of(rows), num_rows=num_decodes, clears=only_decodes, options=options)
    if by_chunks:
        prompts(*operands, rows)
    elif has_prompts:
        options = overlap_alike(v_THRV.device, rows=len(v_THRV)) | {"launch_pdl": False}
        _token_by_token(*operands, prompts_in_order(rows), num_rows=num_prompts, clears=False, options=options)
    return out_THRV


def _token_by_token(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    out_THRV: Tensor,
    states_SHRKV: Tensor,
    walk: TokenWalk,
    *,
    num_rows: int,
    clears: bool,
    options: dict[str, bool],
) -> None:
    _, heads, per_head, values = v_THRV.shape
    keys = q_THK.shape[2]
    tile = min(_TILE_V, triton.next_power_of_2(values))
    _correct_and_read[(num_rows, heads * per_head, triton.cdiv(values, tile))](
        q_THK,
        k_THK,
        v_THRV,
        log_decay,
        beta_THR,
        out_THRV,
        states_SHRKV,
        *walk,
        int(clears),
        keys**-0.5,
        *q_THK.stride()[:2],
        *k_THK.stride()[:2],
        *v_THRV.stride()[:3],
        *states_SHRKV.stride(),
        HEADS=heads,
        PER_HEAD=per_head,
        KEYS=keys,
        VALUES=values,
        BLOCK_K=triton.next_power_of_2(keys),
        TILE_V=tile,
        BY_CHANNEL=log_decay.dim() == 4,
        AHEAD=0 if interpreted() else _AHEAD,
        INTERPRETED=interpreted(),
        **options,
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=(*SAME_FOR_ALL, "clears"), do_not_specialize_on_alignment=ANY_ALIGNMENT)
def _correct_and_read(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
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
    clears,
    scale,
    q_stride_T,
    q_stride_H,
    k_stride_T,
    k_stride_H,
    v_stride_T,
    v_stride_H,
    v_stride_R,
    state_stride_S,
    state_stride_H,
    state_stride_R,
    state_stride_K,
    state_stride_V,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    AHEAD: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The tokens of a row, for TILE_V values of one value head; the state stays in registers. It is read before
    the wait, because no kernel of the same step has written it."""
    start_dependents(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    value_head = tl.program_id(1)
    head = value_head // PER_HEAD
    first, stop, context, slot = first_token(row, slots_ptr, lens_ptr, starts_ptr, in_prompts)
    if (slot < 0) | (first >= stop):
        await_predecessors(OVERLAP)
        # Rows that continue others, whose slots are below -1, are not padding.
        if (clears != 0) & (slot >= -1):
            v_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
            out_ptrs_V = out_ptr + (row * (HEADS * PER_HEAD) + value_head) * VALUES + v_V
            tl.store(out_ptrs_V, tl.zeros([TILE_V], out_ptr.dtype.element_ty), mask=v_V < VALUES)
    if (slot >= 0) & (first < stop):
        k_K = tl.arange(0, BLOCK_K)
        v_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
        has_K, has_V = k_K < KEYS, v_V < VALUES
        has_KV = has_K[:, None] & has_V[None, :]
        state_ptrs_KV = (
            state_ptr
            + head * state_stride_H
            + (value_head % PER_HEAD) * state_stride_R
            + k_K[:, None] * state_stride_K
            + v_V[None, :] * state_stride_V
        )
        q_ptrs_K = q_ptr + head * q_stride_H + k_K
        k_ptrs_K = k_ptr + head * k_stride_H + k_K
        v_ptrs = v_ptr + head * v_stride_H + (value_head % PER_HEAD) * v_stride_R + tl.program_id(2) * TILE_V
        v_ptrs_V = v_ptr + head * v_stride_H + (value_head % PER_HEAD) * v_stride_R + v_V
        decays = decay_ptr + value_head * (KEYS if BY_CHANNEL else 1)
        decay_ptrs = decay_ptr + value_head
        if BY_CHANNEL:
            decay_ptrs = decay_ptr + value_head * KEYS + k_K
        beta_ptr += value_head
        GATES: tl.constexpr = HEADS * PER_HEAD
        DECAYS: tl.constexpr = GATES * KEYS if BY_CHANNEL else GATES
        state_KV = tl.load(state_ptrs_KV + slot * state_stride_S, mask=has_KV & (context > 0), other=0.0)
        kept_stop, kept_slot = next_kept(
            row, snapshot_slots_ptr, snapshot_lens_ptr, first, first, stop, slot, num_snapshots
        )
        token = first + 0
        await_predecessors(OVERLAP)
        query_K, key_K = load_token(q_ptrs_K, first, q_stride_T, has_K), load_token(k_ptrs_K, first, k_stride_T, has_K)
        value_V = load_token(v_ptrs_V, first, v_stride_T, has_V)
        decay = load_token(decay_ptrs, first, DECAYS, has_K if BY_CHANNEL else first >= 0)
        beta = load_token(beta_ptr, first, GATES, first >= 0)
        while token >= 0:
            # The next token is loaded while this one is computed: the walk waits for nothing but sums.
            ahead = token + 1
            goes_on = ahead < stop
            ahead_query_K = load_token(q_ptrs_K, ahead, q_stride_T, has_K & goes_on)
            ahead_key_K = load_token(k_ptrs_K, ahead, k_stride_T, has_K & goes_on)
            ahead_value_V = load_token(v_ptrs_V, ahead, v_stride_T, has_V & goes_on)
            ahead_decay = load_token(decay_ptrs, ahead, DECAYS, has_K & goes_on if BY_CHANNEL else goes_on)
            ahead_beta = load_token(beta_ptr, ahead, GATES, goes_on)
            prefetch_token(q_ptr + head * q_stride_H, token, stop, q_stride_T, BLOCK_K, AHEAD)
            prefetch_token(k_ptr + head * k_stride_H, token, stop, k_stride_T, BLOCK_K, AHEAD)
            prefetch_token(v_ptrs, token, stop, v_stride_T, TILE_V, AHEAD)
            prefetch_token(decays, token, stop, DECAYS, BLOCK_K if BY_CHANNEL else 1, AHEAD)
            unit_K = _unit(key_K)
            state_KV *= tl.exp(decay)[:, None] if BY_CHANNEL else tl.exp(decay)
            answer_V = tl.sum(state_KV * unit_K[:, None], axis=0)
            correction_V = (value_V.to(tl.float32) - answer_V) * beta
            state_KV += unit_K[:, None] * correction_V[None, :]
            read_V = tl.sum(state_KV * (_unit(query_K) * scale)[:, None], axis=0)
            out_V = round_to(read_V, out_ptr.dtype.element_ty, INTERPRETED)
            tl.store(out_ptr + (token * GATES + value_head) * VALUES + v_V, out_V, mask=has_V)
            token += 1
            if token == kept_stop:
                tl.store(state_ptrs_KV + kept_slot * state_stride_S, state_KV, mask=has_KV)
                if token < stop:
                    kept_stop, kept_slot = next_kept(
                        row, snapshot_slots_ptr, snapshot_lens_ptr, first, token, stop, slot, num_snapshots
                    )
                else:
                    token, kept_slot = next_decode(next_ptr, slots_ptr, token - 1, has_next)
                    stop, kept_stop = token + 1, token + 1
                    goes_on = token >= 0
                    ahead_query_K = load_token(q_ptrs_K, token, q_stride_T, has_K & goes_on)
                    ahead_key_K = load_token(k_ptrs_K, token, k_stride_T, has_K & goes_on)
                    ahead_value_V = load_token(v_ptrs_V, token, v_stride_T, has_V & goes_on)
                    ahead_decay = load_token(decay_ptrs, token, DECAYS, has_K & goes_on if BY_CHANNEL else goes_on)
                    ahead_beta = load_token(beta_ptr, token, GATES, goes_on)
            query_K, key_K, value_V, decay, beta = ahead_query_K, ahead_key_K, ahead_value_V, ahead_decay, ahead_beta


@triton.jit
def _unit(x_K):
    """A vector in float32, brought to unit length."""
    x_K = x_K.to(tl.float32)
    return x_K * tl.rsqrt(tl.sum(x_K * x_K, axis=0) + 1e-6)
