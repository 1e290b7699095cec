"""Gluon's version of how `attention.kernels.mla.plan` deals tiles out to workers: Gluon cannot call functions written
for Triton.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Work(NamedTuple):
    """A worker's run: tiles [position, stop_position) of the sequence of all requests' tiles. The first tile belongs to
    `request`, whose own tiles begin at `request_start`."""

    request: gl.tensor
    request_start: gl.tensor
    position: gl.tensor
    stop_position: gl.tensor


@gluon.jit
def request_cost(seq_len, SPLIT_TILES: gl.constexpr, TILE: gl.constexpr):
    """Returns the number of tiles that a request takes in the sequence; with a fixed split, whole splits."""
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
    """Returns a worker's `Work`; all workers get equal runs."""
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
    return Work(request, request_start, start, stop)


@gluon.jit
def tiles_with_keys(work, request_start, position, cost, seq_len, TILE: gl.constexpr):
    """Returns tiles [first, last) of a request, counted from the request's first tile, that the worker loads from
    `position` on."""
    first = position - request_start
    last = gl.minimum(gl.minimum(work.stop_position - request_start, cost), gl.cdiv(seq_len, TILE))
    return first, last


@gluon.jit
def next_request(work, request, request_start, cost):
    """Returns the next request, the start of its tiles, and the worker's next position."""
    position = gl.minimum(work.stop_position, request_start + cost)
    request_start += cost
    request += 1
    return request, request_start, position
