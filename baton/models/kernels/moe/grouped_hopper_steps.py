"""What both products of experts on Hopper share, in Gluon: tiles, shared memory, the copies of steps, and stores.

Legend: M row of a warpgroup (one assignment each), N output channel, K input channel; `_C` is in the layout of a
product's result, `_S` in one whose rows are stored whole.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = 64  # of a warpgroup
BOX = 128  # channels that one copy brings; a tile has two of them: gate and up, or neighbours
WARPS = 4  # of a warpgroup
_ROWS, _BOX = gl.constexpr(ROWS), gl.constexpr(BOX)


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
    """Where a product's results go, each in its place or, times a weight, to its assignment. Those in fp8 have
    scales."""

    out: gl.tensor
    scales: gl.tensor | None
    order: gl.tensor
    row_weights: gl.tensor | None


@gluon.jit
def new_stages(weights, STAGES: gl.constexpr, GROUPS: gl.constexpr, GATHERED: gl.constexpr):
    """Allocates shared memory for steps of GROUPS warpgroups' rows and of weights, in boxes of `weights`."""
    dtype: gl.constexpr = weights.dtype
    STEP: gl.constexpr = weights.block_type.shape[1]
    EACH: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_ROWS, STEP], dtype)
    rows = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, _ROWS, STEP], EACH)
    weight_stages = gl.allocate_shared_memory(dtype, [2 * STAGES, _BOX, STEP], weights.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # Each thread that gathers reports its own rows, and one thread expects the copy engine's bytes.
        mbarrier.init(full.index(stage), count=129 if GATHERED else 1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    fence_async_shared()
    return Stages(rows, weight_stages, full, empty)


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
def leave_unread(stages, turn, STEPS: gl.constexpr):
    """Lets a warpgroup without rows leave a tile's steps. Returns the next step's turn."""
    STAGES: gl.constexpr = stages.full.shape[0]
    for _ in range(STEPS):
        stage = turn % STAGES
        mbarrier.wait(stages.full.index(stage), (turn // STAGES) & 1)
        mbarrier.arrive(stages.empty.index(stage), count=1)
        turn += 1
    return turn


@gluon.jit
def silu_and_multiply(gate_C, up_C):
    return gate_C / (1.0 + gl.exp(-gate_C)) * up_C


@gluon.jit
def store_in_order(values_C, results, first, stop, channel, OUT: gl.constexpr, LAYOUT: gl.constexpr):
    """Stores a box of gated results at their places."""
    places_S = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    _store_box(values_C, places_S, places_S < stop, results.out, channel, OUT, LAYOUT)


@gluon.jit
def store_weighted(left_C, right_C, factors_C, results, first, stop, channel, OUT: gl.constexpr, LAYOUT: gl.constexpr):
    """Stores two boxes of results, times their assignments' weights, at their assignments."""
    places_S = first + gl.arange(0, _ROWS, gl.SliceLayout(1, LAYOUT))
    exists_S = places_S < stop
    assignments_S = gl.load(results.order + places_S, mask=exists_S, other=0)
    factors_C = factors_C[:, None]
    _store_box(left_C * factors_C, assignments_S, exists_S, results.out, channel, OUT, LAYOUT)
    _store_box(right_C * factors_C, assignments_S, exists_S, results.out, channel + _BOX, OUT, LAYOUT)


@gluon.jit
def _store_box(values_C, rows_S, exists_S, out, channel, OUT: gl.constexpr, LAYOUT: gl.constexpr):
    values_S = gl.convert_layout(values_C.to(out.dtype.element_ty), LAYOUT)
    channels_S = channel + gl.arange(0, _BOX, gl.SliceLayout(0, LAYOUT))
    pointers_S = out + rows_S.to(gl.int64)[:, None] * OUT + channels_S[None, :]
    gl.store(pointers_S, values_S, mask=exists_S[:, None] & (channels_S < OUT)[None, :])
