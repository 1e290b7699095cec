"""The Hopper kernel with one program per multiprocessor; a program takes tile after tile of a batch's list.

A program begins its next tile before it ends one: the loading warp runs ahead, queries are copied early, and products
of the next tile's first keys run together with those of the last values. The list is dealt out so that all programs end
together.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attention.kernels.paged.call import AttentionCall, LogSumExps, rows_of
from attention.kernels.paged.hopper_attend import (
    add_last_values,
    attend_keys,
    await_last_values,
    first_sums,
    multiply_first,
    multiply_keys,
)
from attention.kernels.paged.hopper_call import TILE_ROWS, choose_tiling, prepare
from attention.kernels.paged.hopper_load import HopperRequestKeys, load_first_keys, load_keys
from attention.kernels.paged.hopper_rows import Split, await_queries, copy_queries, load_queries, queries_of, write
from attention.kernels.paged.hopper_tile import AttentionTile, Sizes, new_buffers, seen_by
from attention.kernels.paged.work_list import ROW_NUMBERS, WorkList
from attention.kernels.tma_rows import TmaPlaces

_NUMBERS = gl.constexpr(ROW_NUMBERS)
# Of a Hopper multiprocessor, without what barriers and the compiler need.
_SHARED_BYTES = 224 * 1024
# Up to this, all kv heads are worked on at a time, however few the L2 cache is meant for. On an H200, a prompt of 8192
# tokens with 8 kv heads takes 881 us instead of 957, and two take 1797 instead of 1858.
_ALL_HEADS_BYTES = 32 * 2**20


class _Work(NamedTuple):
    """A program's share of the list of `num_items` pairs of a tile and a pack of heads; each round gives one item to
    each of the `num_programs` programs."""

    rows_ptr: gl.tensor
    num_items: gl.tensor
    num_packs: gl.tensor
    section: gl.tensor
    section_items: gl.tensor
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
    all_heads = call.head_key_bytes * call.num_kv_heads <= _ALL_HEADS_BYTES
    attend_items[(min(work.num_programs, work.rows.shape[0] * num_packs),)](
        *prepared.matrices,
        rows_of(call.q_THD),
        rows_of(call.out),
        prepared.scoring,
        *call.lse,
        work.rows,
        work.count,
        num_packs,
        num_packs if all_heads else call.tiles(TILE_ROWS, tiling.pack).section,
        call.keys.block_table,
        0 if call.keys.block_table is None else call.keys.block_table.stride(0),
        call.keys.block_size or 1,
        *prepared.places,
        sizes=prepared.sizes,
        mask=call.mask,
        query_tiles=_query_tiles(prepared.sizes, call.q_THD),
        num_warps=4,
    )
    return True


def _query_tiles(sizes: Sizes, q_THD: Tensor) -> int:
    """Number of tiles whose queries are in shared memory at a time: two, so that the next ones arrive early, if there
    is room and Triton takes them for aligned."""
    channels = sizes.block_a + sizes.block_p
    ring_bytes = sizes.stages * sizes.block_n * (channels + sizes.block_v) * 2
    fit = ring_bytes + 2 * TILE_ROWS * channels * 2 <= _SHARED_BYTES
    aligned = not any(number % 16 for number in (q_THD.data_ptr(), *q_THD.stride()[:2]))
    return 2 if fit and aligned else 1


@gluon.jit(
    do_not_specialize=[
        "lse_stride_h", "lse_stride_t", "num_packs", "section", "table_stride", "block_size",
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
    section,
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
    query_tiles: gl.constexpr,
):
    """Runs one program: divides its share of the list among its warps."""
    lse = LogSumExps(lse_ptr, lse_stride_h, lse_stride_t)
    k_places, v_places = TmaPlaces(k_row_b, k_row_h, k_col_h), TmaPlaces(v_row_b, v_row_h, v_col_h)
    PAGED: gl.constexpr = block_table_ptr is not None
    table_ptr = rows_ptr
    if PAGED:
        table_ptr = block_table_ptr
    num_rows = gl.load(count_ptr)
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if program >= num_rows * num_packs:
        return
    work = _Work(
        rows_ptr, num_rows * num_packs, num_packs, section, num_rows * section, program, num_programs,
        table_ptr, table_stride, block_size,
    )  # fmt: skip
    buffers = new_buffers(k_A.dtype, sizes, query_tiles)
    gl.warp_specialize(
        [
            (
                _attend_items,
                (0, q, out, lse, scoring, buffers, work, sizes, mask, PAGED, query_tiles),
            ),
            (
                _attend_items,
                (1, q, out, lse, scoring, buffers, work, sizes, mask, PAGED, query_tiles),
            ),
            (_load_items, (k_A, k_P, v_V, buffers, work, k_places, v_places, sizes, mask, PAGED)),
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
    QUERY_TILES: gl.constexpr,
):
    """Runs one warpgroup, which has half of each tile.

    If there is room for the queries of two tiles, the products with a tile's last values and with the next tile's first
    keys run together. After a program's last tile, these are that tile's own first keys, and their product is unused.
    """
    whole = Split(None, None, 0, True, 0, 0)
    num_mine = _num_items_of(work)
    tile, _ = _tile_of(work, _item_of(work, 0), sizes, mask, PAGED)
    load_queries(WARPGROUP, q, buffers.q_A.index(WARPGROUP), buffers.q_P.index(WARPGROUP), tile, sizes)
    scores_MN = multiply_first(buffers.q_A.index(WARPGROUP), buffers.q_P.index(WARPGROUP), buffers, 0, sizes)
    turn = 0
    for deal in range(0, num_mine):
        place = WARPGROUP + deal % QUERY_TILES * 2
        q_A, q_P = buffers.q_A.index(place), buffers.q_P.index(place)
        next_item = _item_of(work, gl.minimum(deal + 1, num_mine - 1))
        next_tile, _ = _tile_of(work, next_item, sizes, mask, PAGED)
        next_place = WARPGROUP + (deal + 1) % QUERY_TILES * 2
        next_q_A, next_q_P = buffers.q_A.index(next_place), buffers.q_P.index(next_place)
        if QUERY_TILES == 2:
            copy_queries(WARPGROUP, q, next_q_A, next_q_P, next_tile, sizes)
            # Otherwise each product of keys waits for the other warps, as if it read what is copied.
            tl.debug_barrier()
        queries = queries_of(WARPGROUP, tile, sizes)
        max_M, sum_M = first_sums(queries, whole, scoring)
        acc_MV, weights, max_M, sum_M = attend_keys(
            WARPGROUP, q_A, q_P, scores_MN, max_M, sum_M, queries, buffers, tile, turn, scoring, sizes, mask
        )
        turn += _num_key_tiles(tile, sizes)
        if QUERY_TILES == 2:
            await_queries()
            scores_MN, acc_MV = _multiply_both(
                next_q_A, next_q_P, weights, acc_MV, buffers, tile, turn, sizes, mask, PAGED
            )
            write(WARPGROUP, out, whole, lse, acc_MV, max_M, sum_M, q_A, queries, tile, sizes)
        else:
            acc_MV = add_last_values(weights, acc_MV, buffers, tile, turn - 1, sizes, mask, PAGED)
            mbarrier.arrive(buffers.empty_v.index((turn - 1) % sizes.stages), count=1)
            write(WARPGROUP, out, whole, lse, acc_MV, max_M, sum_M, q_A, queries, tile, sizes)
            load_queries(WARPGROUP, q, next_q_A, next_q_P, next_tile, sizes)
            scores_MN = multiply_first(next_q_A, next_q_P, buffers, turn, sizes)
        tile = next_tile


@gluon.jit
def _multiply_both(
    q_A,
    q_P,
    weights,
    acc_MV,
    buffers,
    tile,
    turn,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Returns the products of the next tile's queries with its first keys, which are at place `turn` of the ring, and
    this tile's result, whose last values are at the place before."""
    STAGES: gl.constexpr = sizes.stages
    BLOCK_N: gl.constexpr = sizes.block_n
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage, phase = turn % STAGES, (turn // STAGES) & 1
    mbarrier.wait(buffers.full_k.index(stage), phase)
    scores = multiply_keys(q_A, q_P, buffers.k_A.index(stage), buffers.k_P.index(stage), sizes.block_p, mma_N)
    values = await_last_values(buffers, tile, turn - 1, sizes, mask, PAGED)
    acc = warpgroup_mma(weights, values, acc_MV, is_async=True)
    scores_MN = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(buffers.empty_k.index(stage), count=1)
    acc_MV = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(buffers.empty_v.index((turn - 1) % STAGES), count=1)
    return scores_MN, acc_MV


@gluon.jit
def _load_items(
    k_A,
    k_P,
    v_V,
    buffers,
    work,
    k_places,
    v_places,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Runs the loading warp."""
    turn = 0
    num_mine = _num_items_of(work)
    for deal in range(0, num_mine):
        tile, keys = _tile_of(work, _item_of(work, deal), sizes, mask, PAGED)
        load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, turn, sizes, PAGED)
        turn += _num_key_tiles(tile, sizes)
    tile, keys = _tile_of(work, _item_of(work, num_mine - 1), sizes, mask, PAGED)
    load_first_keys(k_A, k_P, buffers, tile, keys, k_places, turn, sizes, PAGED)


@gluon.jit
def _num_items_of(work):
    rounds, rest = work.num_items // work.num_programs, work.num_items % work.num_programs
    place = gl.where(rounds % 2 == 0, work.program, work.num_programs - 1 - work.program)
    return rounds + (place < rest).to(gl.int32)


@gluon.jit
def _item_of(work, deal):
    """Returns the program's item of a round. Every other round goes backwards, so that no program always gets the
    longest item."""
    last = work.num_programs - 1
    return deal * work.num_programs + work.program + (deal & 1) * (last - 2 * work.program)


@gluon.jit
def _tile_of(work, item, sizes: gl.constexpr, mask: gl.constexpr, PAGED: gl.constexpr):
    """Returns the tile and the places of the keys of an item."""
    PACK: gl.constexpr = sizes.pack
    TOKENS: gl.constexpr = 2 * 64 // PACK
    PACKS: gl.constexpr = (sizes.group + PACK - 1) // PACK
    in_section = item % work.section_items
    section_start = item // work.section_items * work.section
    width = gl.minimum(work.section, work.num_packs - section_start)
    row_ptr = work.rows_ptr + in_section // width * _NUMBERS
    request = gl.load(row_ptr)
    query_start = gl.load(row_ptr + 1)
    query_len = gl.load(row_ptr + 2)
    first_token = gl.load(row_ptr + 3)
    seq_len = gl.load(row_ptr + 4)
    pack = section_start + in_section % width
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
    """Returns how many tiles of keys the rings hold for a tile: one for queries that see no key."""
    return gl.maximum(gl.cdiv(tile.stop_key, sizes.block_n) - tile.first_key // sizes.block_n, 1)
