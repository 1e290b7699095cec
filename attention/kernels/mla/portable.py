"""The latent decode kernel for any sizes, dtypes and GPUs.

Legend as in `attention.kernels.mla.decode`; S keys of a step, M members.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.mla.plan import (
    LOG2_E,
    TILE,
    MLADecodePlan,
    find_work,
    members_of_a_program,
    members_of_tile,
    most_requests,
    request_cost,
    requests_of_a_block,
    tokens_after,
)
from baton.kvcache.fp8 import is_fp8
from baton.tritonlib.fp8 import from_fp8
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents

LN_2 = tl.constexpr(0.6931471805599453)


def launch(
    q_RHC: Tensor,
    kv_layer: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: MLADecodePlan,
    scale: float,
    kv_scale: Tensor | None,
    out: Tensor,
    lse_HR: Tensor | None,
    *,
    selected: bool = False,
    tiles: Tensor | None = None,
) -> None:
    num_heads, channels = q_RHC.shape[1:]
    num_reqs, most_reqs = len(seq_lens), most_requests(len(seq_lens), tiles)
    latent = out.shape[-1]
    tokens = 1 if selected else plan.tile_tokens
    block_m = _members_that_fit(num_heads, tokens, q_RHC.device)
    member_blocks = triton.cdiv(tokens * num_heads, block_m)
    step = 16 if q_RHC.dtype == torch.float32 else 32
    _decode[(plan.num_workers * member_blocks,)](
        q_RHC,
        kv_layer,
        seq_lens,
        block_table,
        tiles,
        out,
        lse_HR,
        plan.partial_output,
        plan.partial_lse,
        kv_scale,
        scale * LOG2_E,
        num_reqs,
        num_heads,
        plan.num_workers,
        kv_layer.shape[2],
        *q_RHC.stride()[:2],
        *kv_layer.stride()[1:3],
        block_table.stride(0),
        *out.stride()[:2],
        *(lse_HR.stride() if lse_HR is not None else (0, 0)),
        LATENT=latent,
        ROTARY=channels - latent,
        SPLIT_TILES=plan.split_tiles,
        TILE=TILE,
        STEP=step,
        BLOCK_R=requests_of_a_block(most_reqs),
        TOKENS=tokens,
        BLOCK_M=block_m,
        BLOCK_L=max(16, triton.next_power_of_2(latent)),
        BLOCK_P=max(16, triton.next_power_of_2(channels - latent)),
        SELECTED=selected,
        FP8=is_fp8(kv_layer),
        INTERPRETED=interpreted(),
        **overlap(q_RHC.device, rows=most_reqs),
        num_warps=8,
        num_stages=2,
    )


def _members_that_fit(num_heads: int, tile_tokens: int, device: torch.device) -> int:
    """Returns the number of members whose tiles fit into shared memory. 64 heads' queries and two steps of keys take up
    to 190 KB, which Hopper and data-center Blackwell have; 16 heads' take 75 KB, which all GPUs have."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return 16
    return members_of_a_program(num_heads, tile_tokens)


@triton.jit(do_not_specialize=["num_reqs", "table_stride_R"])
def _decode(
    q,
    kv,
    seq_lens,
    block_table,
    tiles,
    out,
    lse,
    partial_output,
    partial_lse,
    kv_scale,
    scale,
    num_reqs,
    num_heads,
    num_workers,
    block_size,
    q_stride_R,
    q_stride_H,
    kv_stride_B,
    kv_stride_N,
    table_stride_R,
    out_stride_R,
    out_stride_H,
    lse_stride_H,
    lse_stride_R,
    LATENT: tl.constexpr,
    ROTARY: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SELECTED: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Runs one worker for BLOCK_M members. Workers of the same keys are neighbours, so one finds the keys in L2."""
    SLOT_TOKENS: tl.constexpr = 1 if tiles is None else TOKENS
    start_dependents(OVERLAP)
    member_blocks = tl.cdiv(TOKENS * num_heads, BLOCK_M)
    worker = tl.program_id(0) // member_blocks
    members_M = (tl.program_id(0) % member_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    channels_L = tl.arange(0, BLOCK_L)
    channels_P = tl.arange(0, BLOCK_P)
    request, request_start, position, stop_position = find_work(
        seq_lens, num_reqs, worker, num_workers, SPLIT_TILES, TILE, BLOCK_R
    )
    await_predecessors(OVERLAP)
    value_scale = 1.0
    if kv_scale is not None:
        value_scale = tl.load(kv_scale)
        scale *= value_scale
    while position < stop_position:
        seq_len = tl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        first = position - request_start
        last = tl.minimum(stop_position - request_start, cost)
        if SPLIT_TILES:
            last = tl.minimum(last, first + SPLIT_TILES)
        if cost > 0:
            exists_M, heads_M, rows_M, places_M = members_of_tile(tiles, request, seq_len, members_M, num_heads, TOKENS)
            num_seen_M = seq_len - tokens_after(seq_len, members_M, num_heads, TOKENS)
            table_row = block_table + request.to(tl.int64) * table_stride_R
            if tiles is not None:
                table_row = block_table + tl.load(tiles + 3 * request + 2).to(tl.int64) * table_stride_R
            q_M = (q + rows_M * q_stride_R + heads_M * q_stride_H)[:, None]
            mask_ML = exists_M[:, None] & (channels_L < LATENT)[None, :]
            q_ML = tl.load(q_M + channels_L[None, :], mask=mask_ML, other=0.0)
            mask_MP = exists_M[:, None] & (channels_P < ROTARY)[None, :]
            q_MP = tl.load(q_M + LATENT + channels_P[None, :], mask=mask_MP, other=0.0)
            if INTERPRETED:
                q_ML = q_ML.to(tl.float32)
                q_MP = q_MP.to(tl.float32)
            highest_M = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total_M = tl.zeros([BLOCK_M], tl.float32)
            acc_ML = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
            for start in range(
                bound(first * TILE, INTERPRETED), bound(tl.minimum(last * TILE, seq_len), INTERPRETED), STEP
            ):
                keys = start + tl.arange(0, STEP)
                key_mask = keys < seq_len
                if SELECTED:
                    slots = tl.load(table_row + keys, mask=key_mask, other=0)
                    blocks = slots // block_size
                    offsets = slots % block_size
                else:
                    blocks = tl.load(table_row + keys // block_size, mask=key_mask, other=0)
                    offsets = keys % block_size
                rows = kv + blocks.to(tl.int64) * kv_stride_B + offsets * kv_stride_N
                kv_SL = tl.load(
                    rows[:, None] + channels_L[None, :],
                    mask=key_mask[:, None] & (channels_L < LATENT)[None, :],
                    other=0.0,
                )
                k_SP = tl.load(
                    rows[:, None] + LATENT + channels_P[None, :],
                    mask=key_mask[:, None] & (channels_P < ROTARY)[None, :],
                    other=0.0,
                )
                if FP8:
                    kv_SL = from_fp8(kv_SL, INTERPRETED)
                    k_SP = from_fp8(k_SP, INTERPRETED)
                kv_SL = kv_SL.to(q_ML.dtype)
                k_SP = k_SP.to(q_ML.dtype)
                scores_MS = tl.dot(q_ML, tl.trans(kv_SL), input_precision="ieee")
                scores_MS = tl.dot(q_MP, tl.trans(k_SP), scores_MS, input_precision="ieee") * scale
                # Every member sees a key of each step, so the largest score is finite.
                seen_MS = key_mask[None, :]
                if TOKENS > 1:
                    seen_MS = seen_MS & (keys[None, :] < num_seen_M[:, None])
                scores_MS = tl.where(seen_MS, scores_MS, -float("inf"))
                new_highest_M = tl.maximum(highest_M, tl.max(scores_MS, 1))
                shrink_M = tl.exp2(highest_M - new_highest_M)
                weights_MS = tl.exp2(scores_MS - new_highest_M[:, None])
                total_M = total_M * shrink_M + tl.sum(weights_MS, 1)
                acc_ML = acc_ML * shrink_M[:, None]
                acc_ML = tl.dot(weights_MS.to(kv_SL.dtype), kv_SL, acc_ML, input_precision="ieee")
                highest_M = new_highest_M
            acc_ML = acc_ML * (value_scale / total_M)[:, None]
            lse_M = (highest_M + tl.log2(total_M)) * LN_2
            if (first == 0) & (last == cost):
                out_M = (out + rows_M * out_stride_R + heads_M * out_stride_H)[:, None]
                tl.store(out_M + channels_L[None, :], acc_ML.to(out.dtype.element_ty), mask=mask_ML)
                if lse is not None:
                    tl.store(lse + heads_M * lse_stride_H + rows_M * lse_stride_R, lse_M, mask=exists_M)
            else:
                slot = 2 * worker + (first == 0).to(tl.int32)
                if SPLIT_TILES:
                    slot = position // SPLIT_TILES
                parts_M = (slot.to(tl.int64) * SLOT_TOKENS + places_M) * num_heads + heads_M
                tl.store(partial_output + parts_M[:, None] * LATENT + channels_L[None, :], acc_ML, mask=mask_ML)
                tl.store(partial_lse + parts_M, lse_M, mask=exists_M)
        position = request_start + last
        if last == cost:
            request_start += cost
            request += 1
