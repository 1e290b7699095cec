"""What the warps of the Hopper kernel of block-sparse attention agree on, and the one that loads: which tile of queries
is next, in which order its keys come, and their way into shared memory.
Legend as in `attention.kernels.blocksparse.prefill`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def find_tile(item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED: gl.constexpr):
    """The head and the 128 positions of an item: all heads of a tile together, the last tiles first. None exist of a
    tile in front of the first request, where `query_start_ptr` does not begin with 0."""
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
    block = place // SPARSE_BLOCK
    block = gl.where(block < num_stripes, first_stripe + block * vert_stride, local_start + block - num_stripes)
    return block * SPARSE_BLOCK + place % SPARSE_BLOCK


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
    """Brings one tile of keys or values, piece by piece; what lies past the last key is any of the request's blocks."""
    first_stripe, num_stripes, vert_stride, local_start = order
    row_b, row_h, col_h = strides
    PIECES: gl.constexpr = tile.shape[0] // PIECE
    mbarrier.expect(full, tile.shape[0] * tile.shape[1] * 2)
    for piece in gl.static_range(PIECES):
        piece_place = place + piece * PIECE
        piece_place = gl.where(piece_place < num_keys, piece_place, 0)
        key = key_at(piece_place, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
        if table_ptr is None:
            row = query_start + key
        else:
            row = gl.load(table_ptr + key // block_size) * row_b + key % block_size
        target = tile.slice(piece * PIECE, PIECE, dim=0)
        tma.async_copy_global_to_shared(source, [row + kv_head * row_h, kv_head * col_h], full, target)


@gluon.jit
def load_tiles(
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
        head, request, query_start, context_len, seq_len, tile_start, exists = find_tile(
            item, query_start_ptr, seq_lens_ptr, num_reqs, num_tiles, num_heads, SEARCHED
        )
        if exists:
            _, first_stripe, num_stripes, local_start, num_keys = order_keys(
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
