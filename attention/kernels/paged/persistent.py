"""The Hopper kernel with one program per multiprocessor; a program takes tile after tile of a batch's list.

The loading warp runs ahead into a program's next tile while the multiplying warpgroups finish the last one, and the
list is dealt out so that all programs end together. Both matter where tiles are short: in batches of many prompts.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attention.kernels.paged.call import AttentionCall, LogSumExps, rows_of
from attention.kernels.paged.hopper_attend import Split, attend
from attention.kernels.paged.hopper_call import TILE_ROWS, choose_tiling, prepare
from attention.kernels.paged.hopper_load import HopperRequestKeys, load_keys
from attention.kernels.paged.hopper_tile import AttentionTile, new_buffers, seen_by
from attention.kernels.paged.work_list import ROW_NUMBERS, WorkList
from attention.kernels.tma_rows import TmaPlaces


class _Work(NamedTuple):
    """A program's share of the list of `num_items` pairs of a tile and a pack of heads; each round gives one item to
    each of the `num_programs` programs."""

    rows_ptr: gl.tensor
    num_items: gl.tensor
    num_packs: gl.tensor
    program: gl.tensor
    num_programs: gl.tensor
    table_ptr: gl.tensor
    table_stride: gl.tensor
    block_size: gl.tensor


def launch(call: AttentionCall, work: WorkList) -> bool:
    """Launches the kernel for the call's requests, which the list must hold. Returns False and launches nothing if it
    does not support the call, or the list was made for other tiles."""
    tiling = choose_tiling(call)
    if work.tokens != TILE_ROWS // tiling.pack or work.query_start_loc is not call.query_start_loc:
        return False
    prepared = prepare(call, tiling)
    if prepared is None:
        return False
    num_packs = call.num_kv_heads * -(-call.group // tiling.pack)
    attend_items[(min(work.num_programs, work.rows.shape[0] * num_packs),)](
        *prepared.matrices,
        rows_of(call.q_THD),
        rows_of(call.out),
        prepared.scoring,
        *call.lse,
        work.rows,
        work.count,
        num_packs,
        call.keys.block_table,
        0 if call.keys.block_table is None else call.keys.block_table.stride(0),
        call.keys.block_size or 1,
        *prepared.places,
        sizes=prepared.sizes,
        mask=call.mask,
        numbers=ROW_NUMBERS,
        num_warps=4,
    )
    return True


@gluon.jit(
    do_not_specialize=[
        "lse_stride_h", "lse_stride_t", "num_packs", "table_stride", "block_size",
        "k_row_b", "k_row_h", "k_col_h", "v_row_b", "v_row_h", "v_col_h",
    ],
    do_not_specialize_on_alignment=["block_table_ptr"],
)  # fmt: skip
def attend_items(
    k_A,
    k_P,
    v_V,
    q,
    out,
    scoring,
    lse_ptr,
    lse_stride_h,
    lse_stride_t,
    rows_ptr,
    count_ptr,
    num_packs,
    block_table_ptr,
    table_stride,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    numbers: gl.constexpr,
):
    """Runs one program: divides its share of the list among its warps."""
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    k_places, v_places = TmaPlaces(k_row_b, k_row_h, k_col_h), TmaPlaces(v_row_b, v_row_h, v_col_h)
    PAGED: gl.constexpr = block_table_ptr is not None
    table_ptr = rows_ptr
    if PAGED:
        table_ptr = block_table_ptr
    num_items = gl.load(count_ptr) * num_packs
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    work = _Work(rows_ptr, num_items, num_packs, program, num_programs, table_ptr, table_stride, block_size)
    buffers = new_buffers(k_A.dtype, sizes)
    gl.warp_specialize(
        [
            (_attend_items, (0, q, out, lse, scoring, buffers, work, sizes, mask, PAGED, numbers)),
            (_attend_items, (1, q, out, lse, scoring, buffers, work, sizes, mask, PAGED, numbers)),
            (_load_items, (k_A, k_P, v_V, q, buffers, work, k_places, v_places, sizes, mask, PAGED, numbers)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _attend_items(
    WARPGROUP: gl.constexpr,
    q,
    out,
    lse,
    scoring,
    buffers,
    work,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
    NUMBERS: gl.constexpr,
):
    """Runs one warpgroup, which has half of each tile."""
    turn = 0
    for deal in range(0, gl.cdiv(work.num_items, work.num_programs)):
        item = _item_of(work, deal)
        if item < work.num_items:
            tile, _ = _tile_of(work, item, sizes, mask, PAGED, NUMBERS)
            whole = Split(None, None, 0, True, 0, 0)
            attend(WARPGROUP, q, out, whole, lse, scoring, buffers, tile, turn, sizes, mask, PAGED, True)
            turn += _num_key_tiles(tile, sizes)


@gluon.jit
def _load_items(
    k_A,
    k_P,
    v_V,
    q,
    buffers,
    work,
    k_places,
    v_places,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
    NUMBERS: gl.constexpr,
):
    """Runs the loading warp."""
    turn = 0
    for deal in range(0, gl.cdiv(work.num_items, work.num_programs)):
        item = _item_of(work, deal)
        if item < work.num_items:
            tile, keys = _tile_of(work, item, sizes, mask, PAGED, NUMBERS)
            _prefetch_queries(q, tile, sizes)
            load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, turn, sizes, PAGED)
            turn += _num_key_tiles(tile, sizes)


@gluon.jit
def _prefetch_queries(q, tile, sizes: gl.constexpr):
    """Loads a tile's queries into the L2 cache while the multiplying warpgroups still compute the previous tile."""
    PACK: gl.constexpr = sizes.pack
    CHANNELS: gl.constexpr = sizes.key_size
    LINE: gl.constexpr = 64  # channels in 128 bytes
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    last_token = tile.query_len - 1
    for start in gl.static_range(0, 128, 32):
        rows = start + lanes
        tokens = gl.minimum(tile.first_token + rows // PACK, last_token)
        heads = tile.head + gl.minimum(rows % PACK, tile.heads_left - 1)
        places = q.ptr + (tile.query_start + tokens).to(gl.int64) * q.stride_t + heads * q.stride_h
        for channel in gl.static_range(0, CHANNELS, LINE):
            gl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places + channel], gl.int32, is_pure=False, pack=1
            )


@gluon.jit
def _item_of(work, deal):
    """Returns the program's item of a round. Every other round goes backwards, so that no program always gets the
    longest item."""
    last = work.num_programs - 1
    return deal * work.num_programs + work.program + (deal & 1) * (last - 2 * work.program)


@gluon.jit
def _tile_of(work, item, sizes: gl.constexpr, mask: gl.constexpr, PAGED: gl.constexpr, NUMBERS: gl.constexpr):
    """Returns the tile and the places of the keys of an item."""
    PACK: gl.constexpr = sizes.pack
    TOKENS: gl.constexpr = 2 * 64 // PACK
    PACKS: gl.constexpr = (sizes.group + PACK - 1) // PACK
    row_ptr = work.rows_ptr + item // work.num_packs * NUMBERS
    request = gl.load(row_ptr)
    query_start = gl.load(row_ptr + 1)
    query_len = gl.load(row_ptr + 2)
    first_token = gl.load(row_ptr + 3)
    seq_len = gl.load(row_ptr + 4)
    pack = item % work.num_packs
    kv_head = pack // PACKS
    head = kv_head * sizes.group + pack % PACKS * PACK
    heads_left = sizes.group - pack % PACKS * PACK
    first_position = seq_len - query_len + first_token
    last_position = gl.minimum(first_position + TOKENS, seq_len) - 1
    first_key, stop_key, _, _ = seen_by(first_position, last_position, seq_len, sizes.block_n, mask)
    # Without a table, a request's keys are in the rows of its queries.
    table_ptr = work.table_ptr
    if PAGED:
        table_ptr += request.to(gl.int64) * work.table_stride
    first_block, last_block = first_key // work.block_size, (seq_len - 1) // work.block_size
    keys = HopperRequestKeys(query_start, table_ptr, first_block, last_block, work.block_size)
    return AttentionTile(
        query_start, query_len, first_token, kv_head, head, heads_left, seq_len, first_key, stop_key
    ), keys


@gluon.jit
def _num_key_tiles(tile, sizes: gl.constexpr):
    return gl.maximum(gl.cdiv(tile.stop_key, sizes.block_n) - tile.first_key // sizes.block_n, 0)
