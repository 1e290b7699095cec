"""The products of a prompt's rows with the weights of their experts on Hopper, in Gluon, for `grouped_prompts`.

A program takes tile after tile. One warpgroup begins the copies, as far ahead as there are stages: the copy engine
(TMA) brings weights, and rows that lie in order; rows of tokens anywhere are gathered by their own pointers. The other
warpgroups multiply, each 64 rows by all of the tile's channels. A warpgroup whose rows do not exist multiplies nothing,
so experts with few rows in their last tile cost no more products than in tiles of 64 rows, and their weights are still
read once by all warpgroups.

Legend: M row of a warpgroup (one assignment each), N output channel, K input channel; `_C` is in the layout of a
product's result, `_S` in one whose rows are stored whole.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64  # of a warpgroup
BOX = 128  # channels that one copy brings; a tile has two of them: gate and up, or neighbours
STEP = 64  # inputs
WARPS = 4  # of a warpgroup
_ROWS, _BOX, _STEP = gl.constexpr(ROWS), gl.constexpr(BOX), gl.constexpr(STEP)
_WARPS = gl.constexpr(WARPS)


class Rows(NamedTuple):
    """Where rows are: a descriptor of rows in their places, in boxes of [ROWS, STEP], or, without it, pointers."""

    map: gl.tensor
    x: gl.tensor
    stride: gl.tensor
    order: gl.tensor


class Tiles(NamedTuple):
    """The tiles of `ExpertOrder`."""

    tiles: gl.tensor
    num_tiles: gl.tensor


class Stages(NamedTuple):
    """Shared memory: steps that are there or in flight. A stage has the rows of each warpgroup on their own."""

    rows: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Results(NamedTuple):
    """What a product's results need, and where they go."""

    out: gl.tensor
    order: gl.tensor
    row_weights: gl.tensor


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
    dtype: gl.constexpr = weights.dtype
    EACH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, _STEP], dtype)
    COPYING: gl.constexpr = 4 if x_map is None else 1
    rows = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, _ROWS, _STEP], EACH)
    weight_stages = gl.allocate_shared_memory(dtype, [2 * STAGES, _BOX, _STEP], weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each thread that gathers reports its own rows, and one thread expects the copy engine's bytes.
        mbarrier.init(full.index(stage), count=1 if COPYING == 1 else 129)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    stages = Stages(rows, weight_stages, full, empty)
    source = Rows(x_map, x, x_stride, order)
    tiles = Tiles(tiles_ptr, num_tiles)
    results = Results(out, order, row_weights)
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
def tile_of(tiles, item, OUT: gl.constexpr, GATED: gl.constexpr, TOGETHER: gl.constexpr):
    """Returns (expert, first place, end of the expert's places, first channel) of a program's item."""
    CHANNELS: gl.constexpr = _BOX if GATED else 2 * _BOX
    BLOCKS: gl.constexpr = (OUT + CHANNELS - 1) // CHANNELS
    num_tiles = tiles.num_tiles
    first_tile = item // (TOGETHER * BLOCKS) * TOGETHER
    group_tiles = gl.minimum(num_tiles - first_tile, TOGETHER)
    within = item % (TOGETHER * BLOCKS)
    tile = tiles.tiles + first_tile + within % group_tiles
    return gl.load(tile), gl.load(tile + num_tiles), gl.load(tile + 2 * num_tiles), within // group_tiles * CHANNELS


@gluon.jit
def num_items(tiles, OUT: gl.constexpr, GATED: gl.constexpr):
    CHANNELS: gl.constexpr = _BOX if GATED else 2 * _BOX
    return tiles.num_tiles * ((OUT + CHANNELS - 1) // CHANNELS)


@gluon.jit
def copy_steps(
    source,
    weights,
    stages,
    tiles,
    CHOICES: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Copies the steps of all of the program's tiles, each as soon as the warpgroups have left a stage."""
    STAGES: gl.constexpr = stages.full.shape[0]
    GROUPS: gl.constexpr = stages.rows.shape[0] // STAGES
    HALF: gl.constexpr = OUT if GATED else _BOX
    WEIGHT_BYTES: gl.constexpr = 2 * weights.block_type.nbytes
    STEP: gl.constexpr = weights.block_type.shape[1]
    # A warp copies 128 bytes of each of four rows at a time.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, STEP // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    channels = gl.arange(0, STEP, gl.SliceLayout(0, LAYOUT))
    turn = 0
    for item in range(gl.program_id(0), num_items(tiles, OUT, GATED), gl.num_programs(0)):
        expert, first, stop, channel = tile_of(tiles, item, OUT, GATED, TOGETHER)
        if expert >= 0:
            row = expert * (2 * OUT if GATED else OUT) + channel
            num_groups = gl.minimum(gl.cdiv(stop - first, _ROWS), GROUPS)
            if source.map is None:
                rows_0 = _rows_of(source, first, stop, CHOICES, LAYOUT)
                rows_1 = _rows_of(source, first + _ROWS, stop, CHOICES, LAYOUT)
                rows_2 = _rows_of(source, first + 2 * _ROWS, stop, CHOICES, LAYOUT)
            for start in range(0, IN, STEP):
                stage = turn % STAGES
                full = stages.full.index(stage)
                mbarrier.wait(stages.empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                place = stage * GROUPS
                if source.map is None:
                    _gather(source.x + start, rows_0, stop - first, channels, stages.rows.index(place))
                    if GROUPS > 1:
                        _gather(source.x + start, rows_1, stop - first - _ROWS, channels, stages.rows.index(place + 1))
                    if GROUPS > 2:
                        rows = stages.rows.index(place + 2)
                        _gather(source.x + start, rows_2, stop - first - 2 * _ROWS, channels, rows)
                    async_copy.mbarrier_arrive(full, increment_count=False)
                    mbarrier.expect(full, WEIGHT_BYTES)
                else:
                    for group in gl.static_range(GROUPS):
                        is_last = num_groups == group + 1
                        mbarrier.expect(full, WEIGHT_BYTES + (group + 1) * source.map.block_type.nbytes, pred=is_last)
                    for group in gl.static_range(GROUPS):
                        if group < num_groups:  # past the expert's places come the next expert's
                            rows = stages.rows.index(place + group)
                            tma.async_copy_global_to_shared(source.map, [first + group * _ROWS, start], full, rows)
                left, right = stages.weights.index(2 * stage), stages.weights.index(2 * stage + 1)
                tma.async_copy_global_to_shared(weights, [row, start], full, left)
                tma.async_copy_global_to_shared(weights, [row + HALF, start], full, right)
                turn += 1


@gluon.jit
def _rows_of(source, first, stop, CHOICES: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns where the rows of tokens in places begin, in numbers."""
    places_M = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    exists_M = places_M < stop
    tokens_M = gl.load(source.order + places_M, mask=exists_M, other=0) // CHOICES
    return tokens_M * source.stride


@gluon.jit
def _gather(x, rows_M, num_rows, channels, place):
    exists_M = gl.arange(0, _ROWS, rows_M.type.layout) < num_rows
    pointers = x + (gl.expand_dims(rows_M, 1) + gl.expand_dims(channels, 0))
    async_copy.async_copy_global_to_shared(place, pointers, mask=gl.expand_dims(exists_M, 1))


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
                if not GATED and results.row_weights is not None:
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
                for _ in range(IN // _STEP):
                    stage = turn % STAGES
                    mbarrier.wait(stages.full.index(stage), (turn // STAGES) & 1)
                    mbarrier.arrive(stages.empty.index(stage), count=1)
                    turn += 1


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
    places_S = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    exists_S = places_S < stop
    if GATED:
        values_C = left_C / (1.0 + gl.exp(-left_C)) * right_C
        store_box(values_C, places_S, exists_S, results.out, channel, OUT, LAYOUT)
    else:
        assignments_S = gl.load(results.order + places_S, mask=exists_S, other=0)
        factors_C = factors_C[:, None]
        store_box(left_C * factors_C, assignments_S, exists_S, results.out, channel, OUT, LAYOUT)
        store_box(right_C * factors_C, assignments_S, exists_S, results.out, channel + _BOX, OUT, LAYOUT)


@gluon.jit
def store_box(values_C, rows_S, exists_S, out, channel, OUT: gl.constexpr, LAYOUT: gl.constexpr):
    values_S = gl.convert_layout(values_C.to(out.dtype.element_ty), LAYOUT)
    channels_S = channel + gl.arange(0, _BOX, gl.SliceLayout(0, LAYOUT))
    pointers_S = out + rows_S.to(gl.int64)[:, None] * OUT + channels_S[None, :]
    gl.store(pointers_S, values_S, mask=exists_S[:, None] & (channels_S < OUT)[None, :])
