"""Block-sparse attention of one query per request over the paged cache; it reads only key blocks that the heads see.

Legend: R requests, H query heads, G query heads of a kv head, N keys of
a tile, D channels, P pieces.

One program takes all query heads of one kv head, which share the local blocks, over a piece of the blocks that any of
them sees. Their stripes differ: G heads that slide by `step` have `turns` different sets of stripes, and stripe block b
belongs to heads g with g % turns == b % turns. Each piece leaves a partial result; a second kernel merges them.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.pattern import LOG2E, kernel_pattern
from attention.kernels.blocksparse.tile_ops import cached_rows, dot, load_rows, soften
from baton.tritonlib.launch import bound, interpreted

# Bytes of a tile of keys; this size keeps enough loads in flight.
_TILE_BYTES = 16384
_PROGRAMS_PER_SM = 3
_MAX_PIECES = 64
_MAX_WAVES = 5
_GOOD_FILLING = 0.9


@dataclass(frozen=True)
class SparseDecodePartials:
    """Memory for the pieces' results, shared by all layers and batches; used by one stream at a time.

    Attributes:
        out: [P, H, D] float32, normalised.
        lse2: [P, H] float32, the binary logarithm of the sum of exponentials.
    """

    out: Tensor
    lse2: Tensor


def new_decode_partials(
    *, num_heads: int, num_kv_heads: int, head_size: int, num_sms: int, device: torch.device
) -> SparseDecodePartials:
    """Allocates memory for the pieces that `decode_pieces` returns for any number of requests."""
    num_pieces = triton.cdiv(_MAX_WAVES * _PROGRAMS_PER_SM * num_sms, num_kv_heads)
    return SparseDecodePartials(
        out=torch.empty(num_pieces, num_heads, head_size, dtype=torch.float32, device=device),
        lse2=torch.empty(num_pieces, num_heads, dtype=torch.float32, device=device),
    )


def decode_pieces(*, num_reqs: int, num_kv_heads: int, num_sms: int) -> int:
    """The number of pieces into which each request's keys are cut: the smallest number whose last wave of programs
    leaves almost none of the GPU idle; otherwise as many as fit on the GPU at once.

    It depends on the batch's size alone, so that a captured CUDA graph may keep it. H200, 32/8 heads, 8192 keys, in us
    with this number and with the next best of 1 to 12 pieces: 12 requests 75 and 78, 16: 93 and 96, 32: 169 and 173,
    40: 213 and 219, 56: 288 and 288, 96: 450 and 460.
    """
    room, programs = _PROGRAMS_PER_SM * num_sms, num_reqs * num_kv_heads
    for pieces in range(1, min(_MAX_PIECES, _MAX_WAVES * room // programs) + 1):
        waves = triton.cdiv(programs * pieces, room)
        if programs * pieces >= _GOOD_FILLING * waves * room:
            return pieces
    return max(1, min(_MAX_PIECES, room // programs))


def blocksparse_decode(
    q_RHD: Tensor,
    kv_layer: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor,
    pieces: int,
    partials: SparseDecodePartials,
    scale: float,
    params: BlocksparseParams | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
) -> None:
    """Attends with the last token of each request. A request of length 0 is padding: its output is 0.

    Only the device reads the lengths, so that a captured CUDA graph follows them.

    Args:
        kv_layer: [2, B, N, H, D], any strides but a last one of 1; may be fp8.
        pieces: number of pieces of each request; `partials` must have room for the pieces of all requests.
        params: the pattern; None attends to all blocks.
        k_scale, v_scale: of an fp8 cache; None: 1.
    """
    num_reqs, num_heads, head_size = q_RHD.shape
    num_kv_heads = kv_layer.shape[3]
    group = num_heads // num_kv_heads
    pattern = kernel_pattern(params)
    block_d = max(16, triton.next_power_of_2(head_size))
    block_n = min(128, max(16, _TILE_BYTES // (block_d * kv_layer.element_size())))
    keys, values = kv_layer.unbind(0)
    slides = pattern.heads_per_offset == 1 and pattern.step > 0
    turns = min(group, pattern.vert_stride // gcd(pattern.step, pattern.vert_stride)) if slides else 1
    split = pieces > 1
    assert not split or pieces * num_reqs <= partials.lse2.shape[0]
    _decode_kernel[(num_kv_heads, num_reqs, pieces)](
        q_RHD,
        keys,
        values,
        out,
        partials.out,
        partials.lse2,
        seq_lens,
        block_table,
        k_scale,
        v_scale,
        scale * LOG2E,
        q_RHD.stride(0),
        q_RHD.stride(1),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        pattern.local_blocks,
        pattern.vert_stride,
        pattern.step,
        pattern.first_offset,
        HEADS_PER_OFFSET=pattern.heads_per_offset,
        TURNS=turns,
        GROUP=group,
        NUM_HEADS=num_heads,
        SPARSE_BLOCK=pattern.block_size,
        CACHE_BLOCK=kv_layer.shape[2],
        HEAD_SIZE=head_size,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d,
        BLOCK_N=block_n,
        SPLIT=split,
        FP8=kv_layer.element_size() == 1,
        INTERPRETED=interpreted(),
        num_warps=4,
        num_stages=3,
    )
    if not split:
        return
    _merge_kernel[(num_heads, num_reqs)](
        partials.out,
        partials.lse2,
        out,
        out.stride(0),
        out.stride(1),
        num_reqs * num_heads,
        pieces,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_P=triton.next_power_of_2(pieces),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["local_blocks", "vert_stride", "step", "first_offset", "table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    lse2_ptr,
    seq_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    q_stride_r,
    q_stride_h,
    out_stride_r,
    out_stride_h,
    table_stride,
    k_stride_block,
    k_stride_token,
    k_stride_h,
    v_stride_block,
    v_stride_token,
    v_stride_h,
    local_blocks,
    vert_stride,
    step,
    first_offset,
    HEADS_PER_OFFSET: tl.constexpr,
    TURNS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    kv_head, request, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    pages_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    members = tl.arange(0, BLOCK_G)
    channels = tl.arange(0, BLOCK_D)
    in_head = channels < HEAD_SIZE
    heads = kv_head * GROUP + members
    wanted = (members < GROUP)[:, None] & in_head[None, :]
    q = tl.load(
        q_ptr + request.to(tl.int64) * q_stride_r + heads[:, None] * q_stride_h + channels[None, :],
        mask=wanted,
        other=0.0,
    )
    k_ptr += kv_head * k_stride_h
    v_ptr += kv_head * v_stride_h
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)

    # The stripes before local_start come first, one for each turn in each period, then all blocks from local_start on.
    last_block = tl.maximum(seq_len - 1, 0) // SPARSE_BLOCK
    local_start = tl.maximum(last_block - tl.maximum(local_blocks, 1) + 1, 0)
    offset = (first_offset + kv_head * GROUP // HEADS_PER_OFFSET) * step
    num_stripes = tl.cdiv(local_start, vert_stride) * TURNS
    num_keys = tl.where(seq_len > 0, (num_stripes + last_block + 1 - local_start) * SPARSE_BLOCK, 0)
    num_tiles = tl.cdiv(num_keys, BLOCK_N)
    piece_tiles = tl.cdiv(num_tiles, tl.num_programs(2))
    first_tile = piece * piece_tiles

    m = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    last_tile = tl.minimum(first_tile + piece_tiles, num_tiles)
    for tile in tl.range(bound(first_tile, INTERPRETED), bound(last_tile, INTERPRETED)):
        places = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        ordered = places // SPARSE_BLOCK
        turn = ordered % TURNS
        stripe_offset = (offset + turn * step) % vert_stride
        stripes = ordered // TURNS * vert_stride + vert_stride - 1 - stripe_offset
        on_stripe = ordered < num_stripes
        blocks = tl.where(on_stripe, stripes, local_start + ordered - num_stripes)
        keys = blocks * SPARSE_BLOCK + places % SPARSE_BLOCK
        exists = tl.where(on_stripe, stripes < local_start, keys < seq_len) & (places < num_keys)
        keys = tl.where(exists, keys, 0)
        k_rows = cached_rows(k_ptr, keys, pages_ptr, k_stride_block, k_stride_token, CACHE_BLOCK)
        v_rows = cached_rows(v_ptr, keys, pages_ptr, v_stride_block, v_stride_token, CACHE_BLOCK)
        k = load_rows(k_rows, channels, exists, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
        v = load_rows(v_rows, channels, exists, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
        own_stripe = ((blocks + offset + 1)[None, :] + (members // HEADS_PER_OFFSET * step)[:, None]) % vert_stride == 0
        local = (~on_stripe & (last_block - blocks < local_blocks))[None, :]
        seen = exists[None, :] & (local | own_stripe)
        scores = dot(q, k.T, tl.zeros([BLOCK_G, BLOCK_N], tl.float32), INTERPRETED)
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, m, total = soften(scores, scale, m, total)
        acc = dot(weights.to(q.dtype), v, acc * shrink[:, None], INTERPRETED)

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]  # 0 where no key was seen
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr)
    if SPLIT:
        row = (piece * tl.num_programs(1) + request).to(tl.int64) * NUM_HEADS
        tl.store(partial_ptr + (row + heads[:, None]) * HEAD_SIZE + channels[None, :], acc, mask=wanted)
        lse2 = m + tl.log2(tl.where(total == 0.0, 1.0, total))
        tl.store(lse2_ptr + row + heads, lse2, mask=members < GROUP)
    else:
        tl.store(
            out_ptr + request.to(tl.int64) * out_stride_r + heads[:, None] * out_stride_h + channels[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=wanted,
        )


@triton.jit(do_not_specialize=["rows_per_piece", "pieces"])
def _merge_kernel(
    partial_ptr,
    lse2_ptr,
    out_ptr,
    out_stride_r,
    out_stride_h,
    rows_per_piece,
    pieces,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head, request = tl.program_id(0), tl.program_id(1)
    channels = tl.arange(0, BLOCK_D)
    piece = tl.arange(0, BLOCK_P)
    rows = piece.to(tl.int64) * rows_per_piece + request * NUM_HEADS + head
    lse2 = tl.load(lse2_ptr + rows, mask=piece < pieces, other=float("-inf"))
    highest = tl.max(lse2, 0)
    weights = tl.exp2(lse2 - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    partials = tl.load(
        partial_ptr + rows[:, None] * HEAD_SIZE + channels[None, :],
        mask=(weights > 0.0)[:, None] & (channels < HEAD_SIZE)[None, :],
        other=0.0,
    )
    merged = tl.sum(partials * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + request.to(tl.int64) * out_stride_r + head * out_stride_h + channels,
        merged.to(out_ptr.dtype.element_ty),
        mask=channels < HEAD_SIZE,
    )
