"""Norms and turns queries and keys in place, and writes keys and values to the cache, in one launch.

The twin is the CPU branch of `Attention.rotate_and_attend`. Legend: T tokens, X the channels of all heads, R rows (a
head of a token each), P pairs of rotary channels, C other channels, B N a block and a token in it.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.rotary.channel_pairs import (
    NUM_WARPS,
    TILE_PAIRS,
    cache_places,
    for_cache,
    load_angles,
    load_pairs,
    prefetch_angles,
    store_pairs,
    turn,
)
from attention.rotation import HeadNorms, Rotation
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to


def rotate_qkv(
    qkv_TX: Tensor,
    rotation: Rotation,
    *,
    num_heads: int,
    num_kv_heads: int,
    norms: HeadNorms | None = None,
    gated: bool = False,
    kv_layer: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Norms and turns the queries and keys of each row in place; then writes keys and values to the cache, if given.

    The first 2 P channels of each head turn; the others are only normed and written.

    Args:
        qkv_TX: the heads of queries, keys and values, one after another; rows at any stride.
        gated: a gate follows each head of queries, which stays as it is.
        kv_layer: [2, B, N, H, C], of any dtype that caches have.
        slot_mapping: int64; a negative slot is not written, nor is a token past the last slot.
        k_scale, v_scale: float32 scalars, for an fp8 cache, which stores numbers divided by their scale. None is 1.
    """
    num_tokens, channels = qkv_TX.shape
    head_dim = channels // (num_heads * (2 if gated else 1) + 2 * num_kv_heads)
    pairs = rotation.cos_TP.shape[1]
    block_d = triton.next_power_of_2(head_dim)
    rows = max(1, 2 * TILE_PAIRS // block_d)
    sections = (num_heads, num_kv_heads) if kv_layer is None else (num_heads, num_kv_heads, num_kv_heads)
    if num_tokens == 0:
        return
    _rotate_qkv[(sum(triton.cdiv(num_tokens * heads, rows) for heads in sections),)](
        qkv_TX,
        rotation.cos_TP,
        rotation.sin_TP,
        None if norms is None else norms.q.weight,
        None if norms is None else norms.k.weight,
        kv_layer,
        slot_mapping,
        k_scale,
        v_scale,
        num_tokens,
        0 if slot_mapping is None else slot_mapping.shape[0],
        qkv_TX.stride(0),
        *((0, 0, 0, 0) if kv_layer is None else kv_layer.stride()[:4]),
        0.0 if norms is None else norms.q.eps,
        0.0 if norms is None else norms.k.eps,
        WEIGHT_OFFSET=0 if norms is None else norms.q.weight_offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        QUERY_STEP=2 if gated else 1,
        PAIRS=pairs,
        INTERLEAVED=rotation.interleaved,
        BLOCK_SIZE=1 if kv_layer is None else kv_layer.shape[2],
        ROWS=rows,
        BLOCK_D=block_d,
        BLOCK_P=triton.next_power_of_2(pairs),
        INTERPRETED=interpreted(),
        **overlap(qkv_TX.device, rows=num_tokens),
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def _rotate_qkv(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    q_weight_ptr,
    k_weight_ptr,
    layer_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    num_tokens,
    num_slots,
    qkv_stride_T,
    stride_K,
    stride_B,
    stride_N,
    stride_H,
    q_eps,
    k_eps,
    WEIGHT_OFFSET: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERY_STEP: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Handles ROWS heads of queries, of keys or of values; heads are counted through all tokens. Queries are at every
    QUERY_STEP-th head, keys after them."""
    start_dependents(OVERLAP)
    KEYS_AT: tl.constexpr = QUERY_STEP * NUM_HEADS
    program = tl.program_id(0)
    first_of_k = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
    first_of_v = first_of_k + tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    if program < first_of_k:
        rows_R = program * ROWS + tl.arange(0, ROWS)
        tokens_R = rows_R // NUM_HEADS
        mask_R = tokens_R < num_tokens
        ptrs_R = qkv_ptr + tokens_R.to(tl.int64) * qkv_stride_T + (rows_R % NUM_HEADS) * (QUERY_STEP * HEAD_DIM)
        norm_and_turn(
            ptrs_R, q_weight_ptr, cos_ptr, sin_ptr, None, None, None, tokens_R, mask_R, q_eps,
            WEIGHT_OFFSET, HEAD_DIM, PAIRS, BLOCK_P, INTERLEAVED, INTERPRETED, OVERLAP,
        )  # fmt: skip
    elif program < first_of_v:
        rows_R = (program - first_of_k) * ROWS + tl.arange(0, ROWS)
        tokens_R, heads_R = rows_R // NUM_KV_HEADS, rows_R % NUM_KV_HEADS
        mask_R = tokens_R < num_tokens
        ptrs_R = qkv_ptr + tokens_R.to(tl.int64) * qkv_stride_T + (KEYS_AT + heads_R) * HEAD_DIM
        if layer_ptr is not None:
            into_R, written_R = cache_places(slots_ptr, tokens_R, mask_R, num_slots, stride_B, stride_N, BLOCK_SIZE)
            into_ptrs_R = layer_ptr + into_R + heads_R * stride_H
        else:
            into_ptrs_R, written_R = None, None
        norm_and_turn(
            ptrs_R, k_weight_ptr, cos_ptr, sin_ptr, into_ptrs_R, written_R, k_scale_ptr, tokens_R, mask_R, k_eps,
            WEIGHT_OFFSET, HEAD_DIM, PAIRS, BLOCK_P, INTERLEAVED, INTERPRETED, OVERLAP,
        )  # fmt: skip
    elif layer_ptr is not None:  # programs for values exist only with a cache
        rows_R = (program - first_of_v) * ROWS + tl.arange(0, ROWS)
        tokens_R, heads_R = rows_R // NUM_KV_HEADS, rows_R % NUM_KV_HEADS
        into_R, written_R = cache_places(
            slots_ptr, tokens_R, tokens_R < num_tokens, num_slots, stride_B, stride_N, BLOCK_SIZE
        )
        ptrs_R = qkv_ptr + tokens_R.to(tl.int64) * qkv_stride_T + (KEYS_AT + NUM_KV_HEADS + heads_R) * HEAD_DIM
        channels_D = tl.arange(0, BLOCK_D)
        mask_RD = written_R[:, None] & (channels_D < HEAD_DIM)[None, :]
        await_predecessors(OVERLAP)
        v_RD = tl.load(ptrs_R[:, None] + channels_D[None, :], mask=mask_RD)
        into_ptrs_R = layer_ptr + stride_K + into_R + heads_R * stride_H
        stored_RD = for_cache(v_RD, layer_ptr.dtype.element_ty, v_scale_ptr, INTERPRETED)
        tl.store(into_ptrs_R[:, None] + channels_D[None, :], stored_RD, mask=mask_RD)


@triton.jit
def norm_and_turn(
    ptrs_R,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    into_ptrs_R,
    written_R,
    scale_ptr,
    tokens_R,
    mask_R,
    eps,
    WEIGHT_OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norms and turns rows in place, and writes them to the cache if given. Rounds to the rows' dtype between norm and
    turn, as two calls would."""
    dtype: tl.constexpr = ptrs_R.dtype.element_ty
    REST: tl.constexpr = HEAD_DIM - 2 * PAIRS
    if REST:
        channels_C = tl.arange(0, triton.next_power_of_2(REST))
        rest_ptrs_RC = (ptrs_R + 2 * PAIRS)[:, None] + channels_C[None, :]
        mask_RC = mask_R[:, None] & (channels_C < REST)[None, :]
    if OVERLAP:
        prefetch_angles(cos_ptr, sin_ptr, tokens_R, mask_R, PAIRS)
    if weight_ptr is not None:
        weight_ptrs_R = weight_ptr + tl.zeros_like(tokens_R)
        first_w_RP, second_w_RP = load_pairs(weight_ptrs_R, mask_R, PAIRS, BLOCK_P, INTERLEAVED)
    await_predecessors(OVERLAP)
    first_RP, second_RP = load_pairs(ptrs_R, mask_R, PAIRS, BLOCK_P, INTERLEAVED)
    cos_RP, sin_RP = load_angles(cos_ptr, sin_ptr, tokens_R, mask_R, PAIRS, BLOCK_P)
    if REST:
        rest_RC = tl.load(rest_ptrs_RC, mask=mask_RC, other=0.0)
    if weight_ptr is not None:
        if WEIGHT_OFFSET:
            first_w_RP += WEIGHT_OFFSET
            second_w_RP += WEIGHT_OFFSET
        squares_R = tl.sum(first_RP * first_RP + second_RP * second_RP, 1)
        if REST:
            squares_R += tl.sum(rest_RC.to(tl.float32) * rest_RC.to(tl.float32), 1)
        shrink_R1 = tl.rsqrt(squares_R / HEAD_DIM + eps)[:, None]
        first_RP = round_to(first_RP * shrink_R1 * first_w_RP, dtype, INTERPRETED).to(tl.float32)
        second_RP = round_to(second_RP * shrink_R1 * second_w_RP, dtype, INTERPRETED).to(tl.float32)
        if REST:
            rest_w_C = tl.load(weight_ptr + 2 * PAIRS + channels_C, mask=channels_C < REST, other=0.0).to(tl.float32)
            if WEIGHT_OFFSET:
                rest_w_C += WEIGHT_OFFSET
            rest_RC = round_to(rest_RC.to(tl.float32) * shrink_R1 * rest_w_C[None, :], dtype, INTERPRETED)
            tl.store(rest_ptrs_RC, rest_RC, mask=mask_RC)
    first_RP, second_RP = turn(first_RP, second_RP, cos_RP, sin_RP, dtype, INTERPRETED)
    if into_ptrs_R is not None:
        kept: tl.constexpr = into_ptrs_R.dtype.element_ty
        store_pairs(
            into_ptrs_R,
            for_cache(first_RP, kept, scale_ptr, INTERPRETED),
            for_cache(second_RP, kept, scale_ptr, INTERPRETED),
            written_R, PAIRS, BLOCK_P, INTERLEAVED,
        )  # fmt: skip
        if REST:
            into_ptrs_RC = (into_ptrs_R + 2 * PAIRS)[:, None] + channels_C[None, :]
            stored_RC = for_cache(rest_RC, kept, scale_ptr, INTERPRETED)
            tl.store(into_ptrs_RC, stored_RC, mask=mask_RC & written_R[:, None])
    store_pairs(ptrs_R, first_RP, second_RP, mask_R, PAIRS, BLOCK_P, INTERLEAVED)
