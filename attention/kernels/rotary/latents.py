"""Norms latents, turns their rotary keys and the queries' rotary parts, and writes the latents to the cache, in one
launch.

The twin is the CPU branch of `MLAAttention.rotate_and_attend`. Legend: T tokens, H query heads, D their channels, P
pairs of rotary channels, R rows (a head of a token each), L latent channels, C = L + 2 P, B N a block and a token in
it.
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
    store_pairs,
    turn,
)
from attention.rotation import Rotation, RowNorm
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to


def rotate_latents(
    q_THD: Tensor,
    latent_TC: Tensor,
    rotation: Rotation,
    *,
    norm: RowNorm,
    multiplier: float = 1.0,
    decode_q_THC: Tensor | None = None,
    kv_layer: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    scale: Tensor | None = None,
) -> None:
    """Norms the latents and turns the last 2 P channels of each latent row and each query in place; then writes the
    latent rows to the cache, if given.

    Args:
        q_THD, latent_TC: any strides, channels adjacent.
        multiplier: factor of normed latents.
        decode_q_THC: memory that receives the turned part of the first tokens' queries instead, one row per token; its
            first L channels are unchanged.
        kv_layer: [1, B, N, 1, C], of any dtype that caches have.
        slot_mapping: int64; a negative slot is not written, nor is a token past the last slot.
        scale: float32 scalar, for an fp8 cache, which stores numbers divided by it. None is 1.
    """
    num_tokens, num_heads, channels = q_THD.shape
    pairs = rotation.cos_TP.shape[1]
    latent = latent_TC.shape[1] - 2 * pairs
    block_p = triton.next_power_of_2(pairs)
    rows = max(1, TILE_PAIRS // 2 // block_p)
    if num_tokens == 0:
        return
    _rotate_latents[(num_tokens + triton.cdiv(num_tokens * num_heads, rows),)](
        q_THD,
        latent_TC,
        rotation.cos_TP,
        rotation.sin_TP,
        norm.weight,
        decode_q_THC,
        kv_layer,
        slot_mapping,
        scale,
        num_tokens,
        0 if decode_q_THC is None else decode_q_THC.shape[0],
        0 if slot_mapping is None else slot_mapping.shape[0],
        *q_THD.stride()[:2],
        latent_TC.stride(0),
        *((0, 0) if decode_q_THC is None else decode_q_THC.stride()[:2]),
        *((0, 0) if kv_layer is None else kv_layer.stride()[1:3]),
        norm.eps,
        WEIGHT_OFFSET=norm.weight_offset,
        MULTIPLIER=multiplier,
        NUM_HEADS=num_heads,
        WITHOUT_POSITION=channels - 2 * pairs,
        LATENT=latent,
        PAIRS=pairs,
        INTERLEAVED=rotation.interleaved,
        BLOCK_SIZE=1 if kv_layer is None else kv_layer.shape[2],
        ROWS=rows,
        BLOCK_L=triton.next_power_of_2(latent),
        BLOCK_P=block_p,
        INTERPRETED=interpreted(),
        **overlap(q_THD.device, rows=num_tokens),
        num_warps=NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_decodes", "num_slots"])
def _rotate_latents(
    q_ptr,
    latent_ptr,
    cos_ptr,
    sin_ptr,
    weight_ptr,
    decode_q_ptr,
    layer_ptr,
    slots_ptr,
    scale_ptr,
    num_tokens,
    num_decodes,
    num_slots,
    q_stride_T,
    q_stride_H,
    latent_stride_T,
    decode_q_stride_T,
    decode_q_stride_H,
    stride_B,
    stride_N,
    eps,
    WEIGHT_OFFSET: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    WITHOUT_POSITION: tl.constexpr,
    LATENT: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Handles one token's latent row, or ROWS heads of queries, counted through all tokens."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    dtype: tl.constexpr = latent_ptr.dtype.element_ty
    program = tl.program_id(0)
    if program < num_tokens:
        token_1 = program + tl.arange(0, 1)
        every_1 = token_1 >= 0
        row_1 = latent_ptr + token_1.to(tl.int64) * latent_stride_T
        if layer_ptr is not None:
            into_1, written_1 = cache_places(slots_ptr, token_1, every_1, num_slots, stride_B, stride_N, BLOCK_SIZE)
            into_1 = layer_ptr + into_1
        first_1P, second_1P = load_pairs(row_1 + LATENT, every_1, PAIRS, BLOCK_P, INTERLEAVED)
        cos_1P, sin_1P = load_angles(cos_ptr, sin_ptr, token_1, every_1, PAIRS, BLOCK_P)
        first_1P, second_1P = turn(first_1P, second_1P, cos_1P, sin_1P, dtype, INTERPRETED)
        latent_1L = _normed(row_1, weight_ptr, eps, WEIGHT_OFFSET, MULTIPLIER, LATENT, BLOCK_L, INTERPRETED)
        channels_L = tl.arange(0, BLOCK_L)
        mask_1L = (channels_L < LATENT)[None, :]
        if layer_ptr is not None:
            kept: tl.constexpr = layer_ptr.dtype.element_ty
            stored_1L = for_cache(latent_1L, kept, scale_ptr, INTERPRETED)
            tl.store(into_1[:, None] + channels_L[None, :], stored_1L, mask=written_1[:, None] & mask_1L)
            store_pairs(
                into_1 + LATENT,
                for_cache(first_1P, kept, scale_ptr, INTERPRETED),
                for_cache(second_1P, kept, scale_ptr, INTERPRETED),
                written_1, PAIRS, BLOCK_P, INTERLEAVED,
            )  # fmt: skip
        tl.store(row_1[:, None] + channels_L[None, :], latent_1L, mask=mask_1L)
        store_pairs(row_1 + LATENT, first_1P, second_1P, every_1, PAIRS, BLOCK_P, INTERLEAVED)
    else:
        rows_R = (program - num_tokens) * ROWS + tl.arange(0, ROWS)
        tokens_R, heads_R = rows_R // NUM_HEADS, rows_R % NUM_HEADS
        mask_R = tokens_R < num_tokens
        ptrs_R = q_ptr + tokens_R.to(tl.int64) * q_stride_T + heads_R * q_stride_H + WITHOUT_POSITION
        first_RP, second_RP = load_pairs(ptrs_R, mask_R, PAIRS, BLOCK_P, INTERLEAVED)
        cos_RP, sin_RP = load_angles(cos_ptr, sin_ptr, tokens_R, mask_R, PAIRS, BLOCK_P)
        first_RP, second_RP = turn(first_RP, second_RP, cos_RP, sin_RP, dtype, INTERPRETED)
        if decode_q_ptr is not None:
            into_R = decode_q_ptr + tokens_R.to(tl.int64) * decode_q_stride_T + heads_R * decode_q_stride_H + LATENT
            decodes_R = tokens_R < num_decodes
            store_pairs(into_R, first_RP, second_RP, mask_R & decodes_R, PAIRS, BLOCK_P, INTERLEAVED)
            mask_R = mask_R & (tokens_R >= num_decodes)
        store_pairs(ptrs_R, first_RP, second_RP, mask_R, PAIRS, BLOCK_P, INTERLEAVED)


@triton.jit
def _normed(
    row_1,
    weight_ptr,
    eps,
    WEIGHT_OFFSET: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_L: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Returns a normed latent [1, L] in the row's dtype, rounded before and after the multiplication."""
    channels_1L = tl.arange(0, BLOCK_L)[None, :]
    mask_1L = channels_1L < LATENT
    x_1L = tl.load(row_1[:, None] + channels_1L, mask=mask_1L, other=0.0).to(tl.float32)
    weight_1L = tl.load(weight_ptr + channels_1L, mask=mask_1L, other=0.0).to(tl.float32)
    if WEIGHT_OFFSET:
        weight_1L += WEIGHT_OFFSET
    shrink_11 = tl.rsqrt(tl.sum(x_1L * x_1L, 1) / LATENT + eps)[:, None]
    normed_1L = round_to(x_1L * shrink_11 * weight_1L, row_1.dtype.element_ty, INTERPRETED)
    if MULTIPLIER == 1.0:
        return normed_1L
    return round_to(normed_1L.to(tl.float32) * MULTIPLIER, row_1.dtype.element_ty, INTERPRETED)
