"""The latent decode kernel for any sizes, dtypes and GPUs.

Legend as in `attention.kernels.mla.decode`; S keys of a step.
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
    heads_of_a_program,
    request_cost,
    requests_of_a_block,
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
) -> None:
    num_reqs, num_heads, channels = q_RHC.shape
    latent = out.shape[-1]
    block_h = _heads_that_fit(num_heads, q_RHC.device)
    head_blocks = triton.cdiv(num_heads, block_h)
    step = 16 if q_RHC.dtype == torch.float32 else 32
    _decode[(plan.num_workers * head_blocks,)](
        q_RHC,
        kv_layer,
        seq_lens,
        block_table,
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
        BLOCK_R=requests_of_a_block(num_reqs),
        BLOCK_H=block_h,
        BLOCK_L=max(16, triton.next_power_of_2(latent)),
        BLOCK_P=max(16, triton.next_power_of_2(channels - latent)),
        SELECTED=selected,
        FP8=is_fp8(kv_layer),
        INTERPRETED=interpreted(),
        **overlap(q_RHC.device, rows=num_reqs),
        num_warps=8,
        num_stages=2,
    )


def _heads_that_fit(num_heads: int, device: torch.device) -> int:
    """Returns the number of heads whose tiles fit into shared memory. 64 heads' queries and two steps of keys take up
    to 190 KB, which Hopper and data-center Blackwell have; 16 heads' take 75 KB, which all GPUs have."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return 16
    return heads_of_a_program(num_heads)


@triton.jit(do_not_specialize=["num_reqs", "table_stride_R"])
def _decode(
    q,
    kv,
    seq_lens,
    block_table,
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
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SELECTED: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Runs one worker for BLOCK_H heads. Workers of the same keys are neighbours, so that one finds the keys in L2."""
    start_dependents(OVERLAP)
    head_blocks = tl.cdiv(num_heads, BLOCK_H)
    worker = tl.program_id(0) // head_blocks
    heads = (tl.program_id(0) % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_mask = heads < num_heads
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
            q_row = q + request.to(tl.int64) * q_stride_R + heads[:, None] * q_stride_H
            q_HL = tl.load(
                q_row + channels_L[None, :], mask=head_mask[:, None] & (channels_L < LATENT)[None, :], other=0.0
            )
            q_HP = tl.load(
                q_row + LATENT + channels_P[None, :],
                mask=head_mask[:, None] & (channels_P < ROTARY)[None, :],
                other=0.0,
            )
            if INTERPRETED:
                q_HL = q_HL.to(tl.float32)
                q_HP = q_HP.to(tl.float32)
            highest_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
            total_H = tl.zeros([BLOCK_H], tl.float32)
            acc_HL = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
            for start in range(
                bound(first * TILE, INTERPRETED), bound(tl.minimum(last * TILE, seq_len), INTERPRETED), STEP
            ):
                keys = start + tl.arange(0, STEP)
                key_mask = keys < seq_len
                table_row = block_table + request.to(tl.int64) * table_stride_R
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
                kv_SL = kv_SL.to(q_HL.dtype)
                k_SP = k_SP.to(q_HL.dtype)
                scores_HS = tl.dot(q_HL, tl.trans(kv_SL), input_precision="ieee")
                scores_HS = tl.dot(q_HP, tl.trans(k_SP), scores_HS, input_precision="ieee") * scale
                scores_HS = tl.where(key_mask[None, :], scores_HS, -float("inf"))
                # A step has at least one key, so the maximum is finite.
                new_highest_H = tl.maximum(highest_H, tl.max(scores_HS, 1))
                shrink_H = tl.exp2(highest_H - new_highest_H)
                weights_HS = tl.exp2(scores_HS - new_highest_H[:, None])
                total_H = total_H * shrink_H + tl.sum(weights_HS, 1)
                acc_HL = acc_HL * shrink_H[:, None]
                acc_HL = tl.dot(weights_HS.to(kv_SL.dtype), kv_SL, acc_HL, input_precision="ieee")
                highest_H = new_highest_H
            acc_HL = acc_HL * (value_scale / total_H)[:, None]
            lse_H = (highest_H + tl.log2(total_H)) * LN_2
            mask_HL = head_mask[:, None] & (channels_L < LATENT)[None, :]
            if (first == 0) & (last == cost):
                target = out + request.to(tl.int64) * out_stride_R + heads[:, None] * out_stride_H + channels_L[None, :]
                tl.store(target, acc_HL.to(out.dtype.element_ty), mask=mask_HL)
                if lse is not None:
                    tl.store(lse + heads * lse_stride_H + request.to(tl.int64) * lse_stride_R, lse_H, mask=head_mask)
            else:
                slot = 2 * worker + (first == 0).to(tl.int32)
                if SPLIT_TILES:
                    slot = position // SPLIT_TILES
                rows_H = slot.to(tl.int64) * num_heads + heads
                tl.store(partial_output + rows_H[:, None] * LATENT + channels_L[None, :], acc_HL, mask=mask_HL)
                tl.store(partial_lse + rows_H, lse_H, mask=head_mask)
        position = request_start + last
        if last == cost:
            request_start += cost
            request += 1
