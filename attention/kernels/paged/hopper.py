"""The Hopper kernel of attention over a batch: one program per tile of queries, with one loading warp (`hopper_load`)
and two multiplying warpgroups (`hopper_attend`).

It computes the same as `attention.kernels.paged.portable`, for 16-bit numbers. The legend is the same, with A and P for
the two parts of the key channels.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention.kernels.paged.call import AttentionCall, AttentionTiles, LogSumExps, Requests, rows_of
from attention.kernels.paged.hopper_attend import attend
from attention.kernels.paged.hopper_call import TILE_ROWS, HopperTiling, choose_tiling, prepare
from attention.kernels.paged.hopper_load import HopperRequestKeys, load_keys
from attention.kernels.paged.hopper_rows import Split
from attention.kernels.paged.hopper_tile import AttentionTile, new_buffers, seen_by
from attention.kernels.paged.split import LEAST_KEYS, merge_splits, new_partials
from attention.kernels.tma_rows import TmaPlaces


def launch(call: AttentionCall, tiling: HopperTiling | None = None) -> bool:
    """Launches the kernel. Returns False and launches nothing if it does not support the sizes or the keys' addresses
    and strides."""
    tiling = tiling or choose_tiling(call)
    prepared = prepare(call, tiling)
    if prepared is None:
        return False
    tiles = call.tiles(TILE_ROWS, tiling.pack)
    partials = new_partials(call)
    attend_tile[(tiles.num_tiles * tiles.num_packs, call.splits)](
        *prepared.matrices,
        rows_of(call.q_THD),
        rows_of(call.out),
        *partials,
        prepared.scoring,
        *call.lse,
        *call.requests,
        *tiles,
        call.keys.block_size or 1,
        *prepared.places,
        call.q_THD.shape[0],
        sizes=prepared.sizes,
        mask=call.mask,
        least_keys=LEAST_KEYS,
        num_warps=4,
    )
    merge_splits(call, partials)
    return True


@gluon.jit(
    do_not_specialize=[
        "lse_stride_h", "lse_stride_t", "num_reqs", "table_stride", "num_tiles", "num_packs", "section", "block_size",
        "k_row_b", "k_row_h", "k_col_h", "v_row_b", "v_row_h", "v_col_h", "num_tokens",
    ],
    # In a batch with decodes, which come first, these pointers may have any alignment.
    do_not_specialize_on_alignment=["query_start_ptr", "key_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)  # fmt: skip
def attend_tile(
    k_A,
    k_P,
    v_V,
    q,
    out,
    partial_out_ptr,
    partial_lse_ptr,
    scoring,
    lse_ptr,
    lse_stride_h,
    lse_stride_t,
    num_reqs,
    query_start_ptr,
    key_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    table_stride,
    num_tiles,
    num_packs,
    section,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    num_tokens,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    least_keys: gl.constexpr,
):
    """Runs one program: finds its tile of queries and divides the work among its warps.

    If there is memory for partial results, the second axis of the grid divides the tile's keys.
    """
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    requests = Requests(num_reqs, query_start_ptr, key_start_ptr, seq_lens_ptr, block_table_ptr, table_stride)
    tiles = AttentionTiles(num_tiles, num_packs, section)
    k_places, v_places = TmaPlaces(k_row_b, k_row_h, k_col_h), TmaPlaces(v_row_b, v_row_h, v_col_h)
    BLOCK_N: gl.constexpr = sizes.block_n
    PACK: gl.constexpr = sizes.pack
    TOKENS: gl.constexpr = 2 * 64 // PACK
    PACKS: gl.constexpr = (sizes.group + PACK - 1) // PACK
    pack, request, query_start, query_len, first_token = _find_tile(requests, tiles, TOKENS)
    if (first_token < 0) | (first_token >= query_len):
        return
    PAGED: gl.constexpr = requests.block_table_ptr is not None
    table_ptr = requests.query_start_ptr
    if not PAGED:
        key_start = gl.load(requests.key_start_ptr + request)
        seq_len = gl.load(requests.key_start_ptr + request + 1) - key_start
    else:
        key_start = 0
        seq_len = gl.load(requests.seq_lens_ptr + request)
        table_ptr = requests.block_table_ptr + request.to(gl.int64) * requests.table_stride
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
    first_key, stop_key, _, _ = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
    alone = True
    if partial_out_ptr is not None:
        first_tile_key = first_key // BLOCK_N * BLOCK_N
        share = _find_share(stop_key - first_tile_key, gl.num_programs(1), BLOCK_N, least_keys)
        alone = stop_key - first_tile_key <= share
        if alone & (gl.program_id(1) > 0):
            return
        split_start = first_tile_key + gl.program_id(1) * share
        first_key = gl.maximum(first_key, split_start)
        stop_key = gl.minimum(stop_key, split_start + share)
    num_heads = num_packs // PACKS * sizes.group
    split = Split(partial_out_ptr, partial_lse_ptr, gl.program_id(1), alone, num_tokens, num_heads)
    kv_head = pack // PACKS
    head = kv_head * sizes.group + pack % PACKS * PACK
    heads_left = sizes.group - pack % PACKS * PACK

    buffers = new_buffers(k_A.dtype, sizes, 1)
    tile = AttentionTile(query_start, query_len, first_token, kv_head, head, heads_left, seq_len, first_key, stop_key)
    first_block, last_block = first_key // block_size, (seq_len - 1) // block_size
    keys = HopperRequestKeys(key_start, table_ptr, first_block, last_block, block_size)
    gl.warp_specialize(
        [
            (_attend, (0, q, out, split, lse, scoring, buffers, tile, sizes, mask, PAGED)),
            (_attend, (1, q, out, split, lse, scoring, buffers, tile, sizes, mask, PAGED)),
            (_load_keys, (k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, sizes, PAGED)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _find_share(num_keys, num_splits, BLOCK_N: gl.constexpr, LEAST: gl.constexpr):
    """As `attention.kernels.paged.split.find_share`."""
    share = gl.cdiv(gl.maximum(num_keys, 0), num_splits)
    return gl.maximum(gl.cdiv(share, BLOCK_N) * BLOCK_N, LEAST)


@gluon.jit
def _find_tile(requests, tiles, TOKENS: gl.constexpr):
    """Finds the program's pack of query heads, its request and first token; the order is the portable kernel's."""
    BLOCK_R: gl.constexpr = 128
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_tiles, num_packs, section = tiles.num_tiles, tiles.num_packs, tiles.section
    num_reqs, query_start_ptr = requests.num_reqs, requests.query_start_ptr
    program = gl.program_id(0)
    section_start = program // (section * num_tiles) * section
    in_section = program % (section * num_tiles)
    width = gl.minimum(section, num_packs - section_start)
    tile = num_tiles - 1 - in_section // width
    pack = section_start + in_section % width
    before = 0
    start = 0
    while start < num_reqs:
        requests_R = start + gl.arange(0, BLOCK_R, layout=layout)
        query_starts_R = gl.load(query_start_ptr + requests_R, mask=requests_R < num_reqs, other=0)
        first_tiles_R = query_starts_R // TOKENS + requests_R
        before += gl.sum(((first_tiles_R <= tile) & (requests_R < num_reqs)).to(gl.int32), 0)
        start += BLOCK_R
    request = gl.maximum(before - 1, 0)
    query_start = gl.load(query_start_ptr + request)
    query_len = gl.load(query_start_ptr + request + 1) - query_start
    return pack, request, query_start, query_len, (tile - (query_start // TOKENS + request)) * TOKENS


@gluon.jit
def _load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, sizes: gl.constexpr, PAGED: gl.constexpr):
    """Runs the loading warp."""
    load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, 0, sizes, PAGED)


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr,
    q,
    out,
    split,
    lse,
    scoring,
    buffers,
    tile,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Runs one multiplying warpgroup."""
    attend(WARPGROUP, q, out, split, lse, scoring, buffers, tile, sizes, mask, PAGED)
