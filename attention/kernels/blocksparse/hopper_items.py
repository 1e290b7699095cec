"""The tiles of queries that a program of the Hopper kernel takes one after another, and the order of the keys that each
tile sees: first the stripes, then the local blocks, as in `attention.kernels.blocksparse.prefill`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def find_tile(item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED: gl.constexpr):
    """Finds the head, the request and the 128 positions of an item. Items go through all heads of a tile, the last
    tiles first. If `query_start_ptr` does not begin with 0, a tile before the first request has no valid positions."""
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
def order_keys(head, tile_start, context_len, seq_len, pattern, SPARSE_BLOCK: gl.constexpr, PER_OFFSET: gl.constexpr):
    """Returns (the head's offset, its first stripe, its number of stripes, the first local block, the number of keys to
    read)."""
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
def key_at(place, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK: gl.constexpr):
    """Returns the positions of keys, given their places in the order of reading."""
    block = place // SPARSE_BLOCK
    block = gl.where(block < num_stripes, first_stripe + block * vert_stride, local_start + block - num_stripes)
    return block * SPARSE_BLOCK + place % SPARSE_BLOCK
