"""The products of a prompt's rows with the weights of their experts on Hopper, in Gluon, for `grouped_prompts`.

A program takes tile after tile. One warpgroup begins the copies, as far ahead as there are stages: the copy engine
(TMA) brings weights, and rows that lie in order; rows of tokens anywhere are gathered by their own pointers. The other
warpgroups multiply, each 64 rows by all of the tile's channels. A warpgroup whose rows do not exist multiplies nothing,
so experts with few rows in their last tile cost no more products than in tiles of 64 rows, and their weights are still
read once by all warpgroups.

Legend as in `grouped_hopper_steps`.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.models.kernels.moe.grouped_hopper_steps import (
    BOX,
    ROWS,
    WARPS,
    Results,
    Rows,
    Tiles,
    copy_steps,
    leave_unread,
    new_stages,
    num_items,
    silu_and_multiply,
    store_in_order,
    store_weighted,
    tile_of,
)

STEP = 64  # inputs
_ROWS, _BOX, _STEP, _WARPS = gl.constexpr(ROWS), gl.constexpr(BOX), gl.constexpr(STEP), gl.constexpr(WARPS)


@gluon.jit(do_not_specialize=["num_tiles"])
def multiply_grouped(
    x_map,
    x,
    weights,
    order,
    tiles_ptr,
    row_weights,
    out,
    x_stride,
    num_tiles,
    CHOICES: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Computes out[place] = silu(gate) * up if GATED, else out[assignment] = product * the assignment's weight.

    Args:
        x_map, x: rows in their places as a descriptor, or rows of tokens.
        weights: a descriptor of all experts' weights as rows [E * channels, IN], in boxes of [BOX, STEP].
        GROUPS: warpgroups that multiply, two or three; a tile has ROWS * GROUPS rows.
        TOGETHER: tiles whose items with the same weights are neighbours.
        REGISTERS: of a thread that multiplies; COPY_REGISTERS: of one that copies.
    """
    COPYING: gl.constexpr = 4 if x_map is None else 1
    stages = new_stages(weights, STAGES, GROUPS, x_map is None)
    source = Rows(x_map, x, x_stride, order)
    tiles = Tiles(tiles_ptr, num_tiles)
    results = Results(out, None, order, row_weights)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, stages, tiles, results, x_map is None, OUT, IN, GATED, TOGETHER)),
                (_multiply, (1, stages, tiles, results, x_map is None, OUT, IN, GATED, TOGETHER)),
                (copy_steps, (source, weights, stages, tiles, CHOICES, OUT, IN, GATED, TOGETHER)),
            ],
            [4, COPYING],
            [REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, stages, tiles, results, x_map is None, OUT, IN, GATED, TOGETHER)),
                (_multiply, (1, stages, tiles, results, x_map is None, OUT, IN, GATED, TOGETHER)),
                (_multiply, (2, stages, tiles, results, x_map is None, OUT, IN, GATED, TOGETHER)),
                (copy_steps, (source, weights, stages, tiles, CHOICES, OUT, IN, GATED, TOGETHER)),
            ],
            [4, 4, COPYING],
            [REGISTERS, REGISTERS, COPY_REGISTERS],
        )


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    stages,
    tiles,
    results,
    GATHERED: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Computes one warpgroup's rows of all of the program's tiles."""
    STAGES: gl.constexpr = stages.full.shape[0]
    GROUPS: gl.constexpr = stages.rows.shape[0] // STAGES
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BOX, 16])
    rows_C = gl.arange(0, _ROWS, gl.SliceLayout(1, C)) + GROUP * _ROWS
    turn = 0
    for item in range(gl.program_id(0), num_items(tiles, OUT, GATED), gl.num_programs(0)):
        expert, first, stop, channel = tile_of(tiles, item, OUT, GATED, TOGETHER)
        if expert >= 0:
            if first + GROUP * _ROWS < stop:
                factors_C = gl.full([_ROWS], 1.0, gl.float32, gl.SliceLayout(1, C))
                if not GATED:
                    exists_C = first + rows_C < stop
                    assignments_C = gl.load(results.order + first + rows_C, mask=exists_C, other=0)
                    factors_C = gl.load(results.row_weights + assignments_C, mask=exists_C, other=0.0)
                left_C = gl.zeros([_ROWS, _BOX], gl.float32, C)
                right_C = gl.zeros([_ROWS, _BOX], gl.float32, C)
                for step in range(IN // _STEP):
                    stage = turn % STAGES
                    mbarrier.wait(stages.full.index(stage), (turn // STAGES) & 1)
                    if GATHERED:  # the tensor cores read by another path than the copies wrote
                        fence_async_shared()
                    left_KN = stages.weights.index(2 * stage).permute((1, 0))
                    right_KN = stages.weights.index(2 * stage + 1).permute((1, 0))
                    rows_MK = stages.rows.index(stage * GROUPS + GROUP)
                    left_C = warpgroup_mma(rows_MK, left_KN, left_C, is_async=True)
                    right_C = warpgroup_mma(rows_MK, right_KN, right_C, is_async=True)
                    left_C, right_C = warpgroup_mma_wait(2, deps=(left_C, right_C))
                    mbarrier.arrive(stages.empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
                    turn += 1
                left_C, right_C = warpgroup_mma_wait(0, deps=(left_C, right_C))
                mbarrier.arrive(stages.empty.index((turn + STAGES - 1) % STAGES), count=1)
                _store(left_C, right_C, factors_C, results, first + GROUP * _ROWS, stop, channel, OUT, GATED, GROUPS)
            else:
                turn = leave_unread(stages, turn, IN // _STEP)


@gluon.jit
def _store(
    left_C,
    right_C,
    factors_C,
    results,
    first,
    stop,
    channel,
    OUT: gl.constexpr,
    GATED: gl.constexpr,
    GROUPS: gl.constexpr,
):
    # A gated product of three groups stores pieces of lines, because a fourth stage takes the memory that turns them
    # into whole ones, and gains more.
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
    LAYOUT: gl.constexpr = left_C.type.layout if GATED and GROUPS == 3 else WHOLE
    if GATED:
        store_in_order(silu_and_multiply(left_C, right_C), results, first, stop, channel, OUT, LAYOUT)
    else:
        store_weighted(left_C, right_C, factors_C, results, first, stop, channel, OUT, LAYOUT)
