"""What a worker of the Hopper kernel reads: its share of the step's keys, and the warp that brings them, tile by tile,
with the bulk tensor copy engine, across the ends of requests too. Legend as in `attention.kernels.mla.decode`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def request_cost(seq_len, SPLIT_TILES: gl.constexpr, TILE: gl.constexpr):
    """As in `attention.kernels.mla.work`; so is `find_work`. Gluon cannot call what is written for Triton."""
    tiles = (seq_len + TILE - 1) // TILE
    if SPLIT_TILES:
        tiles = (tiles + SPLIT_TILES - 1) // SPLIT_TILES * SPLIT_TILES
    return tiles


@gluon.jit
def _add(first, second):
    return first + second


@gluon.jit
def find_work(
    seq_lens, num_reqs, worker, num_workers, SPLIT_TILES: gl.constexpr, TILE: gl.constexpr, BLOCK_R: gl.constexpr
):
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_R // (32 * WARPS))], [32], [WARPS], [0])
    requests_R = gl.arange(0, BLOCK_R, layout=layout)
    lens_R = gl.load(seq_lens + requests_R, mask=requests_R < num_reqs, other=0)
    costs_R = request_cost(lens_R, SPLIT_TILES, TILE)
    stops_R = gl.associative_scan(costs_R, 0, _add)
    total = gl.sum(costs_R, 0)
    if SPLIT_TILES:
        share = gl.cdiv(total // SPLIT_TILES, num_workers) * SPLIT_TILES
    else:
        share = gl.cdiv(total, num_workers)
    start = gl.minimum(worker * share, total)
    stop = gl.minimum(start + share, total)
    behind_R = stops_R <= start
    request = gl.sum(behind_R.to(gl.int32), 0)
    request_start = gl.sum(gl.where(behind_R, costs_R, 0), 0)
    return request, request_start, start, stop


@gluon.jit
def load_tiles(
    kv_L,
    kv_P,
    tiles_L,
    tiles_P,
    full,
    empty,
    seq_lens,
    block_table,
    request,
    request_start,
    position,
    stop_position,
    block_size,
    rows_per_block,
    table_stride_R,
    SPLIT_TILES: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
):
    """Every tile of the worker's requests, in pieces of at most a block, as soon as a buffer is free."""
    PIECES: gl.constexpr = TILE // PIECE
    count = 0
    while position < stop_position:
        seq_len = gl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        row = block_table + request.to(gl.int64) * table_stride_R
        last_block = (seq_len - 1) // block_size
        first = position - request_start
        last = gl.minimum(gl.minimum(stop_position - request_start, cost), gl.cdiv(seq_len, TILE))
        for tile in range(first, last):
            buffer = count % STAGES
            if PIECES == 1:
                # Asked for before the wait, so that the number is there when the buffer is.
                block = gl.load(row + tile * TILE // block_size)
                mbarrier.wait(empty.index(buffer), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(buffer), TILE * (LATENT + ROTARY) * 2)
                kv_row = block * rows_per_block + tile * TILE % block_size
                tma.async_copy_global_to_shared(kv_L, [kv_row, 0], full.index(buffer), tiles_L.index(buffer))
                tma.async_copy_global_to_shared(kv_P, [kv_row, LATENT], full.index(buffer), tiles_P.index(buffer))
            else:
                mbarrier.wait(empty.index(buffer), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(buffer), TILE * (LATENT + ROTARY) * 2)
                for piece in gl.static_range(PIECES):
                    # Past the request's own blocks any block will do: its keys are masked.
                    kv_row = gl.load(row + gl.minimum(tile * PIECES + piece, last_block)) * rows_per_block
                    target_L = tiles_L.index(buffer).slice(piece * PIECE, PIECE, dim=0)
                    target_P = tiles_P.index(buffer).slice(piece * PIECE, PIECE, dim=0)
                    tma.async_copy_global_to_shared(kv_L, [kv_row, 0], full.index(buffer), target_L)
                    tma.async_copy_global_to_shared(kv_P, [kv_row, LATENT], full.index(buffer), target_P)
            count += 1
        position = gl.minimum(stop_position, request_start + cost)
        request_start += cost
        request += 1
