"""The multiplying warpgroups of the Hopper kernel of block-sparse attention. They compute the next tile's softmax while
the tensor cores multiply one tile's weights with its values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.kernels.blocksparse.hopper_items import find_tile, key_at, order_keys


@gluon.jit
def attend_rows(
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
    """Runs one warpgroup, which has the first or second 64 positions of every tile."""
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
        head, _, query_start, context_len, seq_len, tile_start, exists = find_tile(
            item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED
        )
        if exists:
            offset, first_stripe, num_stripes, local_start, num_keys = order_keys(
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
    """Masks the keys that these queries do not see, if the tile has any."""
    first_stripe, num_stripes, vert_stride, local_start = order
    BLOCK_N: gl.constexpr = scores.shape[1]
    start = index * BLOCK_N
    local_key = local_start * SPARSE_BLOCK + start - num_stripes * SPARSE_BLOCK
    all_local = (last_query // SPARSE_BLOCK - local_blocks + 1) * SPARSE_BLOCK
    not_all_local = (start + BLOCK_N > num_stripes * SPARSE_BLOCK) & (local_key < all_local)
    if not_all_local | (local_key + BLOCK_N > first_query + 1):
        places = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        keys = key_at(places, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
        key_blocks = keys // SPARSE_BLOCK
        seen = (positions // SPARSE_BLOCK)[:, None] - key_blocks[None, :] < local_blocks
        seen = seen | ((key_blocks + offset + 1) % vert_stride == 0)[None, :]
        seen = seen & (keys[None, :] <= positions[:, None]) & (places < num_keys)[None, :]
        scores = gl.where(seen, scores, -float("inf"))
    return scores


@gluon.jit
def _soften(scores, scale, m, total):
    m_new = gl.maximum(m, gl.max(scores, 1) * scale)
    # For a query that has seen no key yet, any finite maximum gives weights of 0.
    m_finite = gl.where(m_new == -float("inf"), 0.0, m_new)
    weights = gl.exp2(scores * scale - m_finite[:, None])
    shrink = gl.exp2(m - m_finite)
    return weights, shrink, m_new, total * shrink + gl.sum(weights, 1)


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
