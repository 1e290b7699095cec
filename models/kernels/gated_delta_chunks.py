"""The gated delta rule of prompts on a GPU, sub-chunk by sub-chunk (arXiv 2412.06464, section 3.3).

Within a sub-chunk, the corrections that tokens make to one another are the solution of a triangular system. Its inverse
and the products of queries and keys depend on no state, so programs compute those of all sub-chunks side by side. Then
one program for a tile of a state's values goes through the sub-chunks of a prompt. Sub-chunks are cut at absolute
positions, so the bits do not depend on cuts of prompts at multiples of CHUNK. The twin is in
`models.recurrent.gated_delta`. Legend: as there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.kernels.snapshots import snapshot_slot
from models.recurrent.rows import StateRows
from tritonlib.launch import bound, interpreted
from tritonlib.rounding import round_to

CHUNK = 64
_TILE_V = 32
_NUM_WARPS = 8


def prompts(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THRV: Tensor,
    log_decay: Tensor,
    beta_THR: Tensor,
    out_THRV: Tensor,
    states_SHRKV: Tensor,
    rows: StateRows,
) -> None:
    """Writes the outputs of the prompts' tokens, and their states.

    Args:
        log_decay, beta_THR, out_THRV: contiguous.
    """
    num_tokens, heads, per_head, values = v_THRV.shape
    keys = q_THK.shape[2]
    num_prompts = len(rows.prompt_slots_P)
    shape = (num_tokens, heads, per_head, CHUNK)
    inverses_THRJ, products_THRJ = (torch.empty(shape, dtype=torch.float32, device=v_THRV.device) for _ in range(2))
    constants = {
        "HEADS": heads,
        "PER_HEAD": per_head,
        "KEYS": keys,
        "BLOCK_K": max(16, triton.next_power_of_2(keys)),
        "CHUNK": CHUNK,
        "BY_CHANNEL": log_decay.dim() == 4,
        "PRECISION": "tf32x3" if v_THRV.dtype == torch.float32 else "tf32",
        "INTERPRETED": interpreted(),
        "num_warps": _NUM_WARPS,
        "num_stages": 1,
    }
    most_chunks = triton.cdiv(rows.max_prompt_tokens + CHUNK - 1, CHUNK)
    strides = (*q_THK.stride()[:2], *k_THK.stride()[:2])
    requests = rows.prompt_slots_P, rows.prompt_starts_P1, rows.prompt_context_P
    _systems[(num_prompts * most_chunks, heads * per_head)](
        q_THK,
        k_THK,
        log_decay,
        beta_THR,
        inverses_THRJ,
        products_THRJ,
        *requests,
        keys**-0.5,
        most_chunks,
        *strides,
        LEVELS=CHUNK.bit_length() - 1,
        **constants,
    )
    tile = max(16, min(_TILE_V, triton.next_power_of_2(values)))
    _scan[(num_prompts, heads * per_head, triton.cdiv(values, tile))](
        q_THK,
        k_THK,
        v_THRV,
        log_decay,
        beta_THR,
        inverses_THRJ,
        products_THRJ,
        out_THRV,
        states_SHRKV,
        *requests,
        rows.snapshot_slots_PM,
        rows.snapshot_lens_PM,
        keys**-0.5,
        *strides,
        *v_THRV.stride()[:3],
        *states_SHRKV.stride(),
        VALUES=values,
        TILE_V=tile,
        SNAPSHOTS=rows.snapshot_slots_PM.shape[1],
        **constants,
    )


@triton.jit
def _systems(
    q_ptr,
    k_ptr,
    decay_ptr,
    beta_ptr,
    inverses_ptr,
    products_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    scale,
    most_chunks,
    q_stride_T,
    q_stride_H,
    k_stride_T,
    k_stride_H,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One sub-chunk of one value head: the inverse of its system, and the faded products of queries and keys."""
    prompt = tl.program_id(0) // most_chunks
    value_head = tl.program_id(1)
    head = value_head // PER_HEAD
    start = tl.load(starts_ptr + prompt)
    stop = tl.load(starts_ptr + prompt + 1)
    before = tl.load(context_ptr + prompt) % CHUNK
    aligned = start - before + tl.program_id(0) % most_chunks * CHUNK
    first = tl.maximum(aligned, start)
    count = tl.minimum(aligned + CHUNK, stop) - first
    if (tl.load(slots_ptr + prompt) >= 0) & (count > 0):
        i_I = tl.arange(0, CHUNK)
        k_K = tl.arange(0, BLOCK_K)
        has_I = i_I < count
        has_IK = has_I[:, None] & (k_K < KEYS)[None, :]
        tokens_I = (first + i_I).to(tl.int64)
        gates_I = tokens_I * (HEADS * PER_HEAD) + value_head
        q_IK = _units(q_ptr, tokens_I, head, q_stride_T, q_stride_H, k_K, has_IK) * scale
        k_IK = _units(k_ptr, tokens_I, head, k_stride_T, k_stride_H, k_K, has_IK)
        beta_I = tl.load(beta_ptr + gates_I, mask=has_I, other=0.0)
        if BY_CHANNEL:
            decay_IK = tl.load(decay_ptr + gates_I[:, None] * KEYS + k_K[None, :], mask=has_IK, other=0.0)
            total_IK = tl.cumsum(decay_IK, axis=0)
            keys_IJ = tl.zeros([CHUNK, CHUNK], tl.float32)
            products_IJ = tl.zeros([CHUNK, CHUNK], tl.float32)
            # With products of blocks of 16 tokens in its place, 8192 tokens of Kimi-Linear took 373 ms on an H200; with
            # this loop, and systems inverted row by row, 342.
            for j in range(bound(count, INTERPRETED)):
                is_j_I1 = (i_I == j)[:, None]
                k_j_K = tl.sum(tl.where(is_j_I1, k_IK, 0.0), axis=0)
                total_j_K = tl.sum(tl.where(is_j_I1, total_IK, 0.0), axis=0)
                # Rows before j are masked below: there the exponent would be above 0.
                faded_IK = tl.exp(tl.minimum(total_IK - total_j_K[None, :], 0.0)) * k_j_K[None, :]
                is_j_1J = (i_I == j)[None, :]
                keys_IJ = tl.where(is_j_1J, tl.sum(k_IK * faded_IK, axis=1)[:, None], keys_IJ)
                products_IJ = tl.where(is_j_1J, tl.sum(q_IK * faded_IK, axis=1)[:, None], products_IJ)
        else:
            total_I = tl.cumsum(tl.load(decay_ptr + gates_I, mask=has_I, other=0.0), axis=0)
            fade_IJ = tl.exp(tl.minimum(total_I[:, None] - total_I[None, :], 0.0))
            keys_IJ = tl.dot(k_IK, tl.trans(k_IK), input_precision=PRECISION) * fade_IJ
            products_IJ = tl.dot(q_IK, tl.trans(k_IK), input_precision=PRECISION) * fade_IJ
        products_IJ = tl.where(i_I[:, None] >= i_I[None, :], products_IJ, 0.0)
        inverse_IJ = _inverse(tl.where(i_I[:, None] > i_I[None, :], keys_IJ * beta_I[:, None], 0.0), CHUNK, LEVELS)
        places_IJ = gates_I[:, None] * CHUNK + i_I[None, :]
        tl.store(inverses_ptr + places_IJ, inverse_IJ, mask=has_I[:, None])
        tl.store(products_ptr + places_IJ, products_IJ, mask=has_I[:, None])


@triton.jit
def _scan(
    q_ptr,
    k_ptr,
    v_ptr,
    decay_ptr,
    beta_ptr,
    inverses_ptr,
    products_ptr,
    out_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    snapshot_slots_ptr,
    snapshot_lens_ptr,
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
    VALUES: tl.constexpr,
    TILE_V: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    HEADS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """All sub-chunks of one prompt, for TILE_V values of one value head."""
    prompt = tl.program_id(0)
    value_head = tl.program_id(1)
    head = value_head // PER_HEAD
    slot = tl.load(slots_ptr + prompt).to(tl.int64)
    start = tl.load(starts_ptr + prompt)
    stop = tl.load(starts_ptr + prompt + 1)
    context = tl.load(context_ptr + prompt)
    if (slot >= 0) & (start < stop):
        i_I = tl.arange(0, CHUNK)
        k_K = tl.arange(0, BLOCK_K)
        v_V = tl.program_id(2) * TILE_V + tl.arange(0, TILE_V)
        has_V = v_V < VALUES
        state_ptrs_KV = (
            state_ptr
            + slot * state_stride_S
            + head * state_stride_H
            + (value_head % PER_HEAD) * state_stride_R
            + k_K[:, None] * state_stride_K
            + v_V[None, :] * state_stride_V
        )
        has_KV = (k_K < KEYS)[:, None] & has_V[None, :]
        state_KV = tl.load(state_ptrs_KV, mask=has_KV & (context > 0), other=0.0)
        aligned = start - context % CHUNK
        for chunk in range(bound((stop - aligned + CHUNK - 1) // CHUNK, INTERPRETED)):
            first = tl.maximum(aligned + chunk * CHUNK, start)
            has_I = i_I < tl.minimum(aligned + (chunk + 1) * CHUNK, stop) - first
            has_IK = has_I[:, None] & (k_K < KEYS)[None, :]
            has_IV = has_I[:, None] & has_V[None, :]
            tokens_I = (first + i_I).to(tl.int64)
            gates_I = tokens_I * (HEADS * PER_HEAD) + value_head
            places_IJ = gates_I[:, None] * CHUNK + i_I[None, :]
            q_IK = _units(q_ptr, tokens_I, head, q_stride_T, q_stride_H, k_K, has_IK) * scale
            k_IK = _units(k_ptr, tokens_I, head, k_stride_T, k_stride_H, k_K, has_IK)
            v_ptrs_I = v_ptr + tokens_I * v_stride_T + head * v_stride_H + (value_head % PER_HEAD) * v_stride_R
            v_IV = tl.load(v_ptrs_I[:, None] + v_V[None, :], mask=has_IV, other=0.0).to(tl.float32)
            beta_I = tl.load(beta_ptr + gates_I, mask=has_I, other=0.0)
            if BY_CHANNEL:
                decay_IK = tl.load(decay_ptr + gates_I[:, None] * KEYS + k_K[None, :], mask=has_IK, other=0.0)
                total_IX = tl.cumsum(decay_IK, axis=0)
                last_X = tl.sum(decay_IK, axis=0)
            else:  # Triton 3.6 adds up [I, 1] wrongly
                decay_I = tl.load(decay_ptr + gates_I, mask=has_I, other=0.0)
                total_IX = tl.cumsum(decay_I, axis=0)[:, None]
                last_X = tl.zeros([1], tl.float32) + tl.sum(decay_I, axis=0)
            fade_IX = tl.exp(total_IX)
            answer_IV = tl.dot(k_IK * fade_IX, state_KV, input_precision=PRECISION)
            inverse_IJ = tl.load(inverses_ptr + places_IJ, mask=has_I[:, None], other=0.0)
            wanted_IV = (v_IV - answer_IV) * beta_I[:, None]
            written_IV = tl.dot(inverse_IJ, wanted_IV, input_precision=PRECISION)
            products_IJ = tl.load(products_ptr + places_IJ, mask=has_I[:, None], other=0.0)
            out_IV = tl.dot(q_IK * fade_IX, state_KV, input_precision=PRECISION)
            out_IV += tl.dot(products_IJ, written_IV, input_precision=PRECISION)
            left_IK = k_IK * tl.exp(last_X[None, :] - total_IX)
            state_KV *= tl.exp(last_X)[:, None]
            state_KV += tl.dot(tl.trans(left_IK), written_IV, input_precision=PRECISION)
            out_ptrs_IV = out_ptr + gates_I[:, None] * VALUES + v_V[None, :]
            tl.store(out_ptrs_IV, round_to(out_IV, out_ptr.dtype.element_ty, INTERPRETED), mask=has_IV)
            length = aligned + (chunk + 1) * CHUNK - start
            snapshot = snapshot_slot(snapshot_slots_ptr, snapshot_lens_ptr, prompt, length, SNAPSHOTS).to(tl.int64)
            if snapshot >= 0:
                tl.store(state_ptrs_KV + (snapshot - slot) * state_stride_S, state_KV, mask=has_KV)
        tl.store(state_ptrs_KV, state_KV, mask=has_KV)


@triton.jit
def _units(ptr, tokens_I, head, stride_T, stride_H, k_K, has_IK):
    """Vectors of one head, in float32, brought to unit length."""
    ptrs_IK = ptr + (tokens_I * stride_T + head * stride_H)[:, None] + k_K[None, :]
    x_IK = tl.load(ptrs_IK, mask=has_IK, other=0.0).to(tl.float32)
    return x_IK * tl.rsqrt(tl.sum(x_IK * x_IK, axis=1) + 1e-6)[:, None]


@triton.jit
def _inverse(below_IJ, CHUNK: tl.constexpr, LEVELS: tl.constexpr):
    """The inverse of 1 + `below_IJ`, which is 0 on and above the diagonal: first that of each block of two tokens on
    the diagonal, then of blocks twice as large, each from the inverses of its halves (block forward substitution)."""
    i_I1, j_1J = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse_IJ = (i_I1 == j_1J).to(tl.float32) - tl.where(i_I1 // 2 == j_1J // 2, below_IJ, 0.0)
    for level in range(1, LEVELS):
        is_between_IJ = (i_I1 >> level != j_1J >> level) & (i_I1 >> (level + 1) == j_1J >> (level + 1))
        between_IJ = tl.where(is_between_IJ, below_IJ, 0.0)
        answer_IJ = tl.dot(between_IJ, inverse_IJ, input_precision="tf32x3")
        inverse_IJ -= tl.dot(inverse_IJ, answer_IJ, input_precision="tf32x3")
    return inverse_IJ
