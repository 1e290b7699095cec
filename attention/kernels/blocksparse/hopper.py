"""Block-sparse attention of prompts on Hopper: a warp that loads, two warpgroups that multiply.

Computes what `attention.kernels.blocksparse.prefill` computes, in the same order, for 16-bit keys and values. Programs
stay on their multiprocessor and take one tile of queries after another, so the loading warp fetches the next tile's
keys while the last tile's results are written: with few blocks per tile, writing costs most. The legend is the same.
H200, 8192 tokens, 32/8 heads of 128, block size 64, from the cache: 402 us here and 572 there with 16 local blocks and
a stride of 8, 195 and 249 with 4 and 16, 1415 and 1663 with all blocks; from the prompt's own keys 393 and 408.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.blocksparse.pattern import LOG2E, KernelPattern
from attention.kernels.tma_rows import TmaRows, as_rows

# 128 keys and 2 stages: 482 us where these take 402.
_BLOCK_N = 64
_STAGES = 4
_CONSUMER_REGISTERS = 232
_LOADER_REGISTERS = 40
# Requests that one step of the search for a tile's request compares.
_SEARCHED = 128
_HEAD_SIZES = (64, 128)
# Rows in one copy.
_PIECES = (16, 32, 64, 128)


def launch(
    q_THD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    scale: float,
    pattern: KernelPattern,
    out: Tensor,
    num_sms: int,
    block_n: int = _BLOCK_N,
    stages: int = _STAGES,
) -> bool:
    """Launches the kernel. Does nothing and returns False unless heads have 64 or 128 channels of 16 bits, in rows that
    the bulk copy engine can read.

    Args:
        block_table: None: all keys are in one block, each request's from the row of its first query on.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    block_size, num_kv_heads = k_BNHD.shape[1:3]
    piece = min(block_n, pattern.block_size, block_n if block_table is None else block_size)
    k_rows, v_rows = as_rows(k_BNHD), as_rows(v_BNHD)
    if (
        k_rows is None
        or v_rows is None
        or q_THD.dtype not in (torch.bfloat16, torch.float16)
        or q_THD.dtype != k_BNHD.dtype
        or head_size not in _HEAD_SIZES
        or piece not in _PIECES
        or (block_table is not None and block_size % piece)
    ):
        return False
    dtype = gl.bfloat16 if q_THD.dtype == torch.bfloat16 else gl.float16
    num_reqs = seq_lens.shape[0]
    # Two more tiles than full ones: a request's last may be partial, and its first need not begin with its first token.
    num_tiles = num_tokens // 128 + 2 * num_reqs

    def descriptor(rows: TmaRows) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([piece, head_size], dtype)
        return TensorDescriptor.from_tensor(rows.rows, [piece, head_size], layout)

    _attend_kernel[(min(num_sms, num_tiles * num_heads),)](
        descriptor(k_rows),
        descriptor(v_rows),
        q_THD,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        scale * LOG2E,
        num_reqs,
        num_tiles,
        num_heads,
        block_size,
        *k_rows.places,
        *v_rows.places,
        0 if block_table is None else block_table.stride(0),
        *q_THD.stride()[:2],
        *out.stride()[:2],
        pattern.local_blocks,
        pattern.vert_stride,
        pattern.step,
        pattern.first_offset,
        HEADS_PER_OFFSET=pattern.heads_per_offset,
        GROUP=num_heads // num_kv_heads,
        SPARSE_BLOCK=pattern.block_size,
        HEAD_SIZE=head_size,
        BLOCK_N=block_n,
        PIECE=piece,
        STAGES=stages,
        SEARCHED=_SEARCHED,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4,
    )
    return True


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tiles", "local_blocks", "vert_stride", "step", "first_offset", "table_stride"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _attend_kernel(
    k_source,
    v_source,
    q_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    scale,
    num_reqs,
    num_tiles,
    num_heads,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    table_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    local_blocks,
    vert_stride,
    step,
    first_offset,
    HEADS_PER_OFFSET: gl.constexpr,
    GROUP: gl.constexpr,
    SPARSE_BLOCK: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    SEARCHED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_source.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_SIZE], dtype)
    tiles_q = gl.allocate_shared_memory(dtype, [2, 64, HEAD_SIZE], layout)
    tiles_k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    tiles_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=2)
    barriers = (full_k, empty_k, full_v, empty_v)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h)
    pattern = (local_blocks, vert_stride, step, first_offset)
    gl.warp_specialize(
        [
            (
                _attend_rows,
                (
                    q_ptr, out_ptr, tiles_q, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, scale,
                    num_reqs, num_tiles, num_heads, strides, pattern,
                    0, HEADS_PER_OFFSET, SPARSE_BLOCK, PIECE, SEARCHED,
                ),
            ),
            (
                _attend_rows,
                (
                    q_ptr, out_ptr, tiles_q, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, scale,
                    num_reqs, num_tiles, num_heads, strides, pattern,
                    1, HEADS_PER_OFFSET, SPARSE_BLOCK, PIECE, SEARCHED,
                ),
            ),
            (
                _load_tiles,
                (
                    k_source, v_source, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, block_table_ptr,
                    num_reqs, num_tiles, num_heads, block_size, (k_row_b, k_row_h, k_col_h),
                    (v_row_b, v_row_h, v_col_h), table_stride, pattern, HEADS_PER_OFFSET, GROUP, SPARSE_BLOCK, PIECE,
                    SEARCHED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _find_tile(item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED: gl.constexpr):
    """The head and the 128 positions of an item. Items go through all heads of a tile, the last tiles first. A tile
    before the first request, where `query_start_ptr` does not begin with 0, has no valid positions."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile = num_tiles - 1 - item // num_heads
    before = 0
    start = 0
    while start < num_reqs:
        requests = start + gl.arange(0, SEARCHED, layout=layout)
        first_tiles = gl.load(query_start_ptr + requests, mask=requests < num_reqs, other=0) // 128 + 2 * requests
        before += gl.sum(((first_tiles <= tile) & (requests < num_reqs)).to(gl.int32), 0)
        start += SEARCHED
    request = gl.maximum(before - 1, 0)
    query_start = gl.load(query_start_ptr + request)
    seq_len = gl.load(seq_lens_ptr + request)
    context_len = seq_len - (gl.load(query_start_ptr + request + 1) - query_start)
    tile_start = (context_len // 128 + tile - (query_start // 128 + 2 * request)) * 128
    exists = (before > 0) & (context_len >= 0) & (context_len < seq_len) & (tile_start < seq_len)
    return item % num_heads, request, query_start, context_len, seq_len, tile_start, exists


@gluon.jit
def _order_keys(head, tile_start, context_len, seq_len, pattern, SPARSE_BLOCK: gl.constexpr, PER_OFFSET: gl.constexpr):
    local_blocks, vert_stride, step, first_offset = pattern
    offset = (first_offset + head // PER_OFFSET) * step
    stop = gl.minimum(tile_start + 128, seq_len)
    first_block = gl.maximum(tile_start, context_len) // SPARSE_BLOCK
    local_start = gl.maximum(first_block - gl.maximum(local_blocks, 1) + 1, 0)
    first_stripe = vert_stride - 1 - offset % vert_stride
    num_stripes = gl.maximum(local_start - first_stripe + vert_stride - 1, 0) // vert_stride
    num_keys = (num_stripes - local_start) * SPARSE_BLOCK + stop
    return offset, first_stripe, num_stripes, local_start, num_keys


@gluon.jit
def _key_at(place, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK: gl.constexpr):
    block = place // SPARSE_BLOCK
    block = gl.where(block < num_stripes, first_stripe + block * vert_stride, local_start + block - num_stripes)
    return block * SPARSE_BLOCK + place % SPARSE_BLOCK


@gluon.jit
def _attend_rows(
    q_ptr,
    out_ptr,
    tiles_q,
    tiles_k,
    tiles_v,
    barriers,
    query_start_ptr,
    seq_lens_ptr,
    scale,
    num_reqs,
    num_tiles,
    num_heads,
    strides,
    pattern,
    HALF: gl.constexpr,
    PER_OFFSET: gl.constexpr,
    SPARSE_BLOCK: gl.constexpr,
    PIECE: gl.constexpr,
    SEARCHED: gl.constexpr,
):
    """One warpgroup: the first or second 64 positions of every tile."""
    full_k, empty_k, full_v, empty_v = barriers
    q_stride_t, q_stride_h, out_stride_t, out_stride_h = strides
    local_blocks, vert_stride, _, _ = pattern
    STAGES: gl.constexpr = tiles_k.shape[0]
    BLOCK_N: gl.constexpr = tiles_k.shape[1]
    HEAD_SIZE: gl.constexpr = tiles_k.shape[2]
    dtype: gl.constexpr = tiles_k.dtype
    mma_n: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    mma_d: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_SIZE, 16]
    )
    per_row: gl.constexpr = gl.SliceLayout(1, mma_n)
    per_row_d: gl.constexpr = gl.SliceLayout(1, mma_d)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_d, 2)
    copies: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile_q = tiles_q.index(HALF)
    channels = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, copies))
    count = 0
    for item in range(gl.program_id(0), num_tiles * num_heads, gl.num_programs(0)):
        head, _, query_start, context_len, seq_len, tile_start, exists = _find_tile(
            item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED
        )
        if exists:
            offset, first_stripe, num_stripes, local_start, num_keys = _order_keys(
                head, tile_start, context_len, seq_len, pattern, SPARSE_BLOCK, PER_OFFSET
            )
            order = (first_stripe, num_stripes, vert_stride, local_start)
            tile_start += HALF * 64
            first_query = gl.maximum(tile_start, context_len)
            last_query = gl.minimum(tile_start + 64, seq_len) - 1
            copied = tile_start + gl.arange(0, 64, layout=gl.SliceLayout(1, copies))
            is_query = (copied >= context_len) & (copied < seq_len)
            tokens = (query_start - context_len + copied).to(gl.int64)
            q_places = tokens[:, None] * q_stride_t + head * q_stride_h + channels[None, :]
            tile_q.store(gl.load(q_ptr + q_places, mask=is_query[:, None], other=0.0))
            fence_async_shared()

            positions = tile_start + gl.arange(0, 64, layout=per_row)
            m = gl.full([64], -float("inf"), gl.float32, layout=per_row)
            total = gl.zeros([64], gl.float32, layout=per_row)
            acc = gl.zeros([64, HEAD_SIZE], gl.float32, layout=mma_d)
            zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=mma_n)
            last = gl.cdiv(num_keys, BLOCK_N) - 1

            buffer = count % STAGES
            mbarrier.wait(full_k.index(buffer), (count // STAGES) & 1)
            scores = warpgroup_mma(tile_q, tiles_k.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            mbarrier.arrive(empty_k.index(buffer), count=1)
            scores = _mask(
                scores, 0, positions, offset, order, num_keys, local_blocks, first_query, last_query, SPARSE_BLOCK,
                mma_n,
            )  # fmt: skip
            new_weights, shrink, m, total = _soften(scores, scale, m, total)
            weights = gl.convert_layout(new_weights.to(dtype), operand)
            for index in range(1, last + 1):
                # This tile's softmax overlaps the previous tile's product with its values.
                last_buffer = count % STAGES
                last_phase = (count // STAGES) & 1
                count += 1
                buffer = count % STAGES
                mbarrier.wait(full_k.index(buffer), (count // STAGES) & 1)
                scores = warpgroup_mma(
                    tile_q, tiles_k.index(buffer).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                mbarrier.wait(full_v.index(last_buffer), last_phase)
                acc_next = warpgroup_mma(weights, tiles_v.index(last_buffer), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(empty_k.index(buffer), count=1)
                scores = _mask(
                    scores, index, positions, offset, order, num_keys, local_blocks, first_query, last_query,
                    SPARSE_BLOCK, mma_n,
                )  # fmt: skip
                new_weights, shrink, m, total = _soften(scores, scale, m, total)
                acc = warpgroup_mma_wait(0, deps=(acc_next,))
                mbarrier.arrive(empty_v.index(last_buffer), count=1)
                acc *= gl.convert_layout(shrink, per_row_d)[:, None]
                weights = gl.convert_layout(new_weights.to(dtype), operand)
            buffer = count % STAGES
            mbarrier.wait(full_v.index(buffer), (count // STAGES) & 1)
            if num_keys % PIECE != 0:
                _zero_rows(tiles_v.index(buffer), num_keys - last * BLOCK_N)
                fence_async_shared()
            acc = warpgroup_mma(weights, tiles_v.index(buffer), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty_v.index(buffer), count=1)
            count += 1

            acc *= gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), per_row_d)[:, None]
            # The result passes through the queries' memory, for stores of 16 bytes.
            tile_q.store(acc.to(dtype))
            out_places = tokens[:, None] * out_stride_t + head * out_stride_h + channels[None, :]
            gl.store(out_ptr + out_places, tile_q.load(copies), mask=is_query[:, None])


@gluon.jit
def _zero_rows(tile, valid):
    """Clears the rows past the last key: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BLOCK_N: gl.constexpr = tile.shape[0]
    HEAD_SIZE: gl.constexpr = tile.shape[1]
    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, HEAD_SIZE, 64):
        part = tile.slice(start, 64, dim=1)
        part.store(gl.where((rows < valid)[:, None], part.load(layout), 0.0))


@gluon.jit
def _soften(scores, scale, m, total):
    m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    # For a query that has seen no key yet, any finite maximum gives weights of 0.
    m_finite = gl.where(m_new == -float("inf"), 0.0, m_new)
    weights = gl.exp2(scores * scale - m_finite[:, None])
    shrink = gl.exp2(m - m_finite)
    return weights, shrink, m_new, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _mask(
    scores,
    index,
    positions,
    offset,
    order,
    num_keys,
    local_blocks,
    first_query,
    last_query,
    SPARSE_BLOCK: gl.constexpr,
    layout: gl.constexpr,
):
    """Hides the keys that these queries do not see, if the tile has any."""
    first_stripe, num_stripes, vert_stride, local_start = order
    BLOCK_N: gl.constexpr = scores.shape[1]
    start = index * BLOCK_N
    local_key = local_start * SPARSE_BLOCK + start - num_stripes * SPARSE_BLOCK
    all_local = (last_query // SPARSE_BLOCK - local_blocks + 1) * SPARSE_BLOCK
    not_all_local = (start + BLOCK_N > num_stripes * SPARSE_BLOCK) & (local_key < all_local)
    if not_all_local | (local_key + BLOCK_N > first_query + 1):
        places = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        keys = _key_at(places, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
        key_blocks = keys // SPARSE_BLOCK
        seen = (positions // SPARSE_BLOCK)[:, None] - key_blocks[None, :] < local_blocks
        seen = seen | ((key_blocks + offset + 1) % vert_stride == 0)[None, :]
        seen = seen & (keys[None, :] <= positions[:, None]) & (places < num_keys)[None, :]
        scores = gl.where(seen, scores, -float("inf"))
    return scores


@gluon.jit
def _load_tile(
    source,
    tile,
    full,
    table_ptr,
    place,
    num_keys,
    order,
    query_start,
    block_size,
    kv_head,
    strides,
    SPARSE_BLOCK: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Loads one tile of keys or values, piece by piece; past the last key it reads any of the request's blocks."""
    first_stripe, num_stripes, vert_stride, local_start = order
    row_b, row_h, col_h = strides
    PIECES: gl.constexpr = tile.shape[0] // PIECE
    mbarrier.expect(full, tile.shape[0] * tile.shape[1] * 2)
    for piece in gl.static_range(PIECES):
        piece_place = place + piece * PIECE
        piece_place = gl.where(piece_place < num_keys, piece_place, 0)
        key = _key_at(piece_place, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
        if table_ptr is None:
            row = query_start + key
        else:
            row = gl.load(table_ptr + key // block_size) * row_b + key % block_size
        target = tile.slice(piece * PIECE, PIECE, dim=0)
        tma.async_copy_global_to_shared(source, [row + kv_head * row_h, kv_head * col_h], full, target)


@gluon.jit
def _load_tiles(
    k_source,
    v_source,
    tiles_k,
    tiles_v,
    barriers,
    query_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    num_reqs,
    num_tiles,
    num_heads,
    block_size,
    k_strides,
    v_strides,
    table_stride,
    pattern,
    PER_OFFSET: gl.constexpr,
    GROUP: gl.constexpr,
    SPARSE_BLOCK: gl.constexpr,
    PIECE: gl.constexpr,
    SEARCHED: gl.constexpr,
):
    """The loading warp: the tiles of all of the program's items."""
    full_k, empty_k, full_v, empty_v = barriers
    STAGES: gl.constexpr = tiles_k.shape[0]
    BLOCK_N: gl.constexpr = tiles_k.shape[1]
    vert_stride = pattern[1]
    count = 0
    for item in range(gl.program_id(0), num_tiles * num_heads, gl.num_programs(0)):
        head, request, query_start, context_len, seq_len, tile_start, exists = _find_tile(
            item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED
        )
        if exists:
            _, first_stripe, num_stripes, local_start, num_keys = _order_keys(
                head, tile_start, context_len, seq_len, pattern, SPARSE_BLOCK, PER_OFFSET
            )
            table_ptr = block_table_ptr
            if block_table_ptr is not None:
                table_ptr += request.to(gl.int64) * table_stride
            order = (first_stripe, num_stripes, vert_stride, local_start)
            kv_head = head // GROUP
            for index in range(0, gl.cdiv(num_keys, BLOCK_N)):
                buffer = count % STAGES
                phase = ((count // STAGES) & 1) ^ 1
                place = index * BLOCK_N
                mbarrier.wait(empty_k.index(buffer), phase)
                _load_tile(
                    k_source, tiles_k.index(buffer), full_k.index(buffer), table_ptr, place, num_keys, order,
                    query_start, block_size, kv_head, k_strides, SPARSE_BLOCK, PIECE,
                )  # fmt: skip
                mbarrier.wait(empty_v.index(buffer), phase)
                _load_tile(
                    v_source, tiles_v.index(buffer), full_v.index(buffer), table_ptr, place, num_keys, order,
                    query_start, block_size, kv_head, v_strides, SPARSE_BLOCK, PIECE,
                )  # fmt: skip
                count += 1
