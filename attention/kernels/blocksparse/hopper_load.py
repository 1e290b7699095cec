"""The loading warp of the Hopper kernel of block-sparse attention. It loads tiles of keys and values by the bulk tensor
copy engine, as far ahead of the multiplying warpgroups as there are buffers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attention.kernels.blocksparse.hopper_items import find_tile, key_at, order_keys


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
    """Loads the tiles of all of the program's items."""
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
    """Loads one tile of keys or values, piece by piece; past the last key it reads some block of the request."""
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
