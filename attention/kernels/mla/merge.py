"""Merges the results of several workers for one request.

Legend as in `attention.kernels.mla.decode`; S splits, V channels of a program.
"""

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.mla.plan import TILE, MLADecodePlan, most_requests, request_cost, requests_of_a_block
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents


def merge_splits(
    seq_lens: Tensor, plan: MLADecodePlan, out: Tensor, lse_HR: Tensor | None, tiles: Tensor | None = None
) -> None:
    """Writes the output of each request that several workers share, and 0 for requests without keys.

    Args:
        tiles: as in `attention.kernels.mla.decode`.
    """
    num_heads, latent = out.shape[1:]
    num_reqs, most_reqs = len(seq_lens), most_requests(len(seq_lens), tiles)
    slot_tokens = 1 if tiles is None else plan.tile_tokens
    # A small batch of decodes is cut into many parts per request, so many programs share one request's merge. Tiles of
    # prompts all take the same kernel, which then compiles once: their number changes with every step.
    few = tiles is None and num_reqs * num_heads < 4 * plan.num_workers and not interpreted()
    block_v = min(triton.next_power_of_2(latent), 128 if few else 512)
    block_h = 1 if few else min(triton.next_power_of_2(num_heads), 4)
    _merge_splits[(num_reqs * slot_tokens, triton.cdiv(num_heads, block_h), triton.cdiv(latent, block_v))](
        plan.partial_output,
        plan.partial_lse,
        out,
        lse_HR,
        seq_lens,
        tiles,
        num_reqs,
        num_heads,
        plan.num_workers,
        slot_tokens,
        *out.stride()[:2],
        *(lse_HR.stride() if lse_HR is not None else (0, 0)),
        LATENT=latent,
        SPLIT_TILES=plan.split_tiles,
        TILE=TILE,
        BLOCK_R=requests_of_a_block(most_reqs),
        BLOCK_H=block_h,
        BLOCK_V=block_v,
        AT_ONCE=16 if few else 4,
        INTERPRETED=interpreted(),
        **overlap(out.device, rows=most_reqs),
        num_warps=4,
    )


@triton.jit
def _slots(splits, first_slot, SPLIT_TILES: tl.constexpr):
    """A request's first part is in its worker's second slot; other parts are in their workers' first slots."""
    if SPLIT_TILES:
        return first_slot.to(tl.int64) + splits
    return first_slot.to(tl.int64) + 2 * splits + (splits == 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_reqs"])
def _merge_splits(
    partial_output,
    partial_lse,
    out,
    lse,
    seq_lens,
    tiles,
    num_reqs,
    num_heads,
    num_workers,
    slot_tokens,
    out_stride_R,
    out_stride_H,
    lse_stride_H,
    lse_stride_R,
    LATENT: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AT_ONCE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merges BLOCK_H heads and BLOCK_V channels of one token, unless one worker had the token's whole request.

    Each number is one sum over the splits in their order, whose steps the compiler has no choice of how to round. So
    the blocks do not change the bits. Results of AT_ONCE splits are loaded at once.
    """
    start_dependents(OVERLAP)
    request = tl.program_id(0) // slot_tokens
    place = tl.program_id(0) % slot_tokens
    row = request
    exists = True
    if tiles is not None:
        count = tl.load(tiles + 3 * request + 1)
        row = tl.load(tiles + 3 * request) - (count - 1) + place
        exists = place < count
    requests_R = tl.arange(0, BLOCK_R)
    lens_R = tl.load(seq_lens + requests_R, mask=requests_R < num_reqs, other=0)
    costs_R = request_cost(lens_R, SPLIT_TILES, TILE)
    start = tl.sum(tl.where(requests_R < request, costs_R, 0))
    cost = tl.sum(tl.where(requests_R == request, costs_R, 0))
    if SPLIT_TILES:
        num_splits = cost // SPLIT_TILES
        first_slot = start // SPLIT_TILES
    else:
        share = tl.maximum(tl.cdiv(tl.sum(costs_R), num_workers), 1)
        first_worker = start // share
        num_splits = tl.where(cost > 0, (start + cost - 1) // share - first_worker + 1, 0)
        first_slot = 2 * first_worker
    await_predecessors(OVERLAP)
    if (num_splits != 1) & exists:
        heads_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        channels_V = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        head_mask = heads_H < num_heads
        mask = head_mask[:, None] & (channels_V < LATENT)[None, :]
        highest_H = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total_H = tl.zeros([BLOCK_H], tl.float32)
        acc_HV = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
        for begin in range(0, bound(num_splits, INTERPRETED), 16):
            splits_S = begin + tl.arange(0, 16)
            rows_SH = _slots(splits_S, first_slot, SPLIT_TILES)[:, None] * slot_tokens + place
            mask_SH = (splits_S < num_splits)[:, None] & head_mask[None, :]
            lse_SH = tl.load(partial_lse + rows_SH * num_heads + heads_H[None, :], mask=mask_SH, other=-float("inf"))
            highest_H = tl.maximum(highest_H, tl.max(lse_SH, 0))
        # Heads past the last have no partial results, and -inf minus -inf is NaN.
        highest_H = tl.where(head_mask, highest_H, 0.0)
        for begin in range(0, bound(num_splits, INTERPRETED), AT_ONCE):
            for one in tl.static_range(AT_ONCE):
                split = begin + one
                rows_H = (_slots(split, first_slot, SPLIT_TILES) * slot_tokens + place) * num_heads + heads_H
                exists_H = head_mask & (split < num_splits)
                lse_H = tl.load(partial_lse + rows_H, mask=exists_H, other=-float("inf"))
                part_HV = tl.load(
                    partial_output + rows_H[:, None] * LATENT + channels_V[None, :],
                    mask=exists_H[:, None] & (channels_V < LATENT)[None, :],
                    other=0.0,
                )
                weight_H = tl.exp(lse_H - highest_H)
                total_H += weight_H
                acc_HV = tl.fma(part_HV, tl.broadcast_to(weight_H[:, None], part_HV.shape), acc_HV)
        empty_H = total_H == 0.0
        total_H = tl.where(empty_H, 1.0, total_H)
        target = out + row.to(tl.int64) * out_stride_R + heads_H[:, None] * out_stride_H + channels_V[None, :]
        tl.store(target, (acc_HV / total_H[:, None]).to(out.dtype.element_ty), mask=mask)
        if lse is not None:
            lse_H = tl.where(empty_H, -float("inf"), tl.log(total_H) + highest_H)
            tl.store(lse + heads_H * lse_stride_H + row.to(tl.int64) * lse_stride_R, lse_H, mask=head_mask)
