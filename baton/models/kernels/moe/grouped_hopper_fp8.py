"""The products of `grouped_hopper` with weights and activations of fp8, whose sums of 128 inputs are scaled and added
up in float32.

Legend as in `grouped_hopper_steps`.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from baton.models.formats import fp8
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

STEP = 128  # inputs, and channels, that have one scale
_ROWS, _BOX, _WARPS, _STEP = gl.constexpr(ROWS), gl.constexpr(BOX), gl.constexpr(WARPS), gl.constexpr(STEP)
_LARGEST, _SMALLEST = gl.constexpr(448.0), gl.constexpr(fp8.SMALLEST)


class Scales(NamedTuple):
    """float32: those of rows [rows, IN / STEP], and of experts' weights [E, channels / STEP, IN / STEP]."""

    rows: gl.tensor
    weights: gl.tensor
    stride: gl.tensor


@gluon.jit(do_not_specialize=["num_tiles"])
def multiply_grouped_fp8(
    x_map,
    x,
    x_scales,
    weights,
    weight_scales,
    order,
    tiles_ptr,
    row_weights,
    out,
    out_scales,
    x_stride,
    x_scales_stride,
    num_tiles,
    CHOICES: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    STAGES: gl.constexpr,
    TOGETHER: gl.constexpr,
    REGISTERS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):
    """Does what `grouped_hopper.multiply_grouped` does, with two warpgroups that multiply; gated results are in fp8,
    with a scale for each row's STEP channels."""
    COPYING: gl.constexpr = 4 if x_map is None else 1
    stages = new_stages(weights, STAGES, 2, x_map is None)
    source = Rows(x_map, x, x_stride, order)
    tiles = Tiles(tiles_ptr, num_tiles)
    scales = Scales(x_scales, weight_scales, x_scales_stride)
    results = Results(out, out_scales, order, row_weights)
    gl.warp_specialize(
        [
            (_multiply, (0, stages, tiles, scales, results, CHOICES, OUT, IN, GATED, POWER_OF_TWO, TOGETHER)),
            (_multiply, (1, stages, tiles, scales, results, CHOICES, OUT, IN, GATED, POWER_OF_TWO, TOGETHER)),
            (copy_steps, (source, weights, stages, tiles, CHOICES, OUT, IN, GATED, TOGETHER)),
        ],
        [4, COPYING],
        [REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    stages,
    tiles,
    scales,
    results,
    CHOICES: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
    GATED: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Computes one warpgroup's rows of all of the program's tiles."""
    STAGES: gl.constexpr = stages.full.shape[0]
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, _BOX, 32])
    COLUMNS: gl.constexpr = IN // _STEP
    HALF: gl.constexpr = OUT // _STEP if GATED else 1  # rows of scales between the two boxes
    SCALE_ROWS: gl.constexpr = 2 * (OUT // _STEP) if GATED else OUT // _STEP
    rows_C = gl.arange(0, _ROWS, gl.SliceLayout(1, C)) + GROUP * _ROWS
    turn = 0
    for item in range(gl.program_id(0), num_items(tiles, OUT, GATED), gl.num_programs(0)):
        expert, first, stop, channel = tile_of(tiles, item, OUT, GATED, TOGETHER)
        if expert >= 0:
            if first + GROUP * _ROWS < stop:
                places_C = first + rows_C
                exists_C = places_C < stop
                assignments_C = gl.load(results.order + places_C, mask=exists_C, other=0)
                if GATED:
                    row_scales_C = scales.rows + (assignments_C // CHOICES).to(gl.int64) * scales.stride
                else:
                    row_scales_C = scales.rows + places_C.to(gl.int64) * scales.stride
                left_scales = scales.weights + (expert * SCALE_ROWS + channel // _STEP) * COLUMNS
                # The last box of an odd number has no neighbour, and what is computed for it is not stored.
                right = gl.minimum(channel // _STEP + HALF, SCALE_ROWS - 1)
                right_scales = scales.weights + (expert * SCALE_ROWS + right) * COLUMNS
                left_C = gl.zeros([_ROWS, _BOX], gl.float32, C)
                right_C = gl.zeros([_ROWS, _BOX], gl.float32, C)
                nothing_C = gl.zeros([_ROWS, _BOX], gl.float32, C)
                for step in range(COLUMNS):
                    stage = turn % STAGES
                    scale_C = gl.load(row_scales_C + step, mask=exists_C, other=0.0)
                    left_scale = gl.load(left_scales + step)
                    right_scale = gl.load(right_scales + step)
                    mbarrier.wait(stages.full.index(stage), (turn // STAGES) & 1)
                    if GATED:
                        fence_async_shared()
                    rows_MK = stages.rows.index(stage * 2 + GROUP)
                    left_KN = stages.weights.index(2 * stage).permute((1, 0))
                    product_C = warpgroup_mma(rows_MK, left_KN, nothing_C, use_acc=False)
                    left_C += product_C * (scale_C * left_scale)[:, None]
                    right_KN = stages.weights.index(2 * stage + 1).permute((1, 0))
                    product_C = warpgroup_mma(rows_MK, right_KN, nothing_C, use_acc=False)
                    mbarrier.arrive(stages.empty.index(stage), count=1)
                    right_C += product_C * (scale_C * right_scale)[:, None]
                    turn += 1
                _store(
                    left_C, right_C, places_C, exists_C, assignments_C, results, first + GROUP * _ROWS, stop, channel,
                    OUT, GATED, POWER_OF_TWO,
                )  # fmt: skip
            else:
                turn = leave_unread(stages, turn, COLUMNS)


@gluon.jit
def _store(
    left_C,
    right_C,
    places_C,
    exists_C,
    assignments_C,
    results,
    first,
    stop,
    channel,
    OUT: gl.constexpr,
    GATED: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
    if GATED:
        OF_16: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [_WARPS, 1], [1, 0])
        values_C = silu_and_multiply(left_C, right_C).to(gl.bfloat16).to(gl.float32)
        scale_C = gl.maximum(gl.max(gl.abs(values_C), 1), _SMALLEST) / _LARGEST
        if POWER_OF_TWO:
            bits_C = scale_C.to(gl.int32, bitcast=True)
            scale_C = (((bits_C + 0x7FFFFF) >> 23) << 23).to(gl.float32, bitcast=True)
        gl.store(results.scales + places_C.to(gl.int64) * (OUT // _STEP) + channel // _STEP, scale_C, mask=exists_C)
        store_in_order(values_C / scale_C[:, None], results, first, stop, channel, OUT, OF_16)
    else:
        OF_8: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [_WARPS, 1], [1, 0])
        factors_C = gl.load(results.row_weights + assignments_C, mask=exists_C, other=0.0)
        store_weighted(left_C, right_C, factors_C, results, first, stop, channel, OUT, OF_8)
