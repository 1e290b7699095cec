"""The loading warp of the Hopper kernels of attention over a batch. It loads tiles of keys and values into the rings in
shared memory by the bulk tensor copy engine.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


class HopperRequestKeys(NamedTuple):
    """The places of one request's keys for the loading warp: from `key_start` on, or in the blocks of its table."""

    key_start: gl.tensor
    table_ptr: gl.tensor
    first_block: gl.tensor
    last_block: gl.tensor
    block_size: gl.tensor


@gluon.jit
def load_keys(k_A, k_P, v_V, buffers, tile, keys, k_places, v_places, turn, sizes: gl.constexpr, PAGED: gl.constexpr):
    """Loads all tiles of keys and values, the last keys first, into the rings from place `turn` on."""
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    PIECE: gl.constexpr = sizes.piece
    BLOCK_A: gl.constexpr = sizes.block_a
    BLOCK_P: gl.constexpr = sizes.block_p
    stop = _stop_tile(tile, sizes)
    for count in range(0, stop - tile.first_key // BLOCK_N):
        key = (stop - 1 - count) * BLOCK_N
        stage = (turn + count) % STAGES
        phase = (((turn + count) // STAGES) & 1) ^ 1
        mbarrier.wait(buffers.empty_k.index(stage), phase)
        tile_A, tile_P, full = buffers.k_A.index(stage), buffers.k_P.index(stage), buffers.full_k.index(stage)
        load_tile(k_A, k_P, tile_A, tile_P, full, key, tile.kv_head, keys, k_places, BLOCK_A, BLOCK_P, PIECE, PAGED)
        mbarrier.wait(buffers.empty_v.index(stage), phase)
        tile_V, full = buffers.v.index(stage), buffers.full_v.index(stage)
        load_tile(v_V, v_V, tile_V, tile_V, full, key, tile.kv_head, keys, v_places, sizes.block_v, 0, PIECE, PAGED)


@gluon.jit
def load_first_keys(k_A, k_P, buffers, tile, keys, k_places, turn, sizes: gl.constexpr, PAGED: gl.constexpr):
    """Loads the first tile of keys, without its values, to place `turn` of the ring."""
    stage, phase = turn % sizes.stages, ((turn // sizes.stages) & 1) ^ 1
    mbarrier.wait(buffers.empty_k.index(stage), phase)
    tile_A, tile_P, full = buffers.k_A.index(stage), buffers.k_P.index(stage), buffers.full_k.index(stage)
    key = (_stop_tile(tile, sizes) - 1) * sizes.block_n
    load_tile(
        k_A, k_P, tile_A, tile_P, full, key, tile.kv_head, keys, k_places, sizes.block_a, sizes.block_p, sizes.piece,
        PAGED,
    )  # fmt: skip


@gluon.jit
def _stop_tile(tile, sizes: gl.constexpr):
    """Returns the tile of keys after the last one. Queries that see no key load one tile too."""
    return gl.maximum(gl.cdiv(tile.stop_key, sizes.block_n), tile.first_key // sizes.block_n + 1)


@gluon.jit
def load_tile(
    rows_A,
    rows_P,
    tile_A,
    tile_P,
    full,
    key,
    kv_head,
    keys,
    places,
    BLOCK_A: gl.constexpr,
    BLOCK_P: gl.constexpr,
    PIECE: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Starts the copies of a tile, `PIECE` keys of a block at a time."""
    BLOCK_N: gl.constexpr = tile_A.shape[0]
    mbarrier.expect(full, BLOCK_N * (BLOCK_A + BLOCK_P) * 2)
    for piece in gl.static_range(BLOCK_N // PIECE):
        row = key + piece * PIECE
        if not PAGED:
            row += keys.key_start
        else:
            # Only blocks with visible keys are looked up; for masked keys any block works.
            place = gl.maximum(gl.minimum(row // keys.block_size, keys.last_block), keys.first_block)
            block = gl.load(keys.table_ptr + place)
            row = block * places.row_b + row % keys.block_size
        row += kv_head * places.row_h
        target = tile_A.slice(piece * PIECE, PIECE, dim=0)
        tma.async_copy_global_to_shared(rows_A, [row, kv_head * places.col_h], full, target)
        if BLOCK_P:
            target_P = tile_P.slice(piece * PIECE, PIECE, dim=0)
            tma.async_copy_global_to_shared(rows_P, [row, kv_head * places.col_h + BLOCK_A], full, target_P)
