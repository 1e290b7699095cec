"""The product of few tokens with weights of 8 bits on Hopper, in Gluon; `few_tokens` launches it.

Legend: T tokens, N rows of a tile, P those that are prefetched; `_C` is in the layout of the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.tritonlib.gluon_launch import await_predecessors, await_threads, start_dependents


@gluon.jit(do_not_specialize=["num_tokens", "splits", "x_scale_stride_C"])
def multiply_few_tokens(
    x_map,
    x_scale_ptr,
    weight_map,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_channels,
    splits,
    x_scale_stride_C,
    BLOCKED: gl.constexpr,
    ROWS_PER_SCALE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes one program's share of a tile's steps, which is all of them without `partial_ptr`. A step is COLUMNS
    blocks of channels, and STAGES steps are in flight: their weights from before the wait for the previous kernel."""
    dtype: gl.constexpr = weight_map.dtype
    sum_dtype: gl.constexpr = gl.int32 if dtype == gl.int8 else gl.float32
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 32])
    weight_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, BLOCK], dtype)
    weights = gl.allocate_shared_memory(dtype, [STAGES * COLUMNS, ROWS, BLOCK], weight_layout)
    xs = gl.allocate_shared_memory(dtype, [STAGES * COLUMNS, TOKENS, BLOCK], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    STEP_BYTES: gl.constexpr = COLUMNS * (ROWS + TOKENS) * BLOCK
    tile, part = gl.program_id(0) // splits, gl.program_id(0) % splits
    num_columns = gl.cdiv(num_channels, BLOCK)
    steps = gl.cdiv(num_columns, COLUMNS)
    first = part * steps // splits
    count = (part + 1) * steps // splits - first
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    for stage in gl.static_range(STAGES):
        if stage < count:
            mbarrier.expect(full.index(stage), STEP_BYTES)
            _load(weight_map, tile * ROWS, first + stage, full.index(stage), weights, stage, COLUMNS, BLOCK)
    start_dependents(OVERLAP)
    rows_N = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, C))
    tokens_T = gl.arange(0, TOKENS, gl.SliceLayout(0, C))
    read_T = gl.minimum(tokens_T, num_tokens - 1)
    read_N = gl.minimum(rows_N, num_rows - 1)
    tile_scale_ptr = scale_ptr + tile * ROWS // ROWS_PER_SCALE * num_columns
    await_predecessors(OVERLAP)
    for stage in gl.static_range(STAGES):
        if stage < count:
            _load(x_map, 0, first + stage, full.index(stage), xs, stage, COLUMNS, BLOCK)
    await_threads()
    sum_C = gl.zeros([ROWS, TOKENS], sum_dtype, C)
    for done in range(count):
        turn = done % STAGES
        place = turn * COLUMNS
        column = (first + done) * COLUMNS
        scale_0_T = 1.0
        scale_1_T = 1.0
        scale_2_T = 1.0
        scale_3_T = 1.0
        if BLOCKED:
            x_scales_T = x_scale_ptr + read_T
            scale_0_T = _scale(x_scales_T, tile_scale_ptr, column, num_columns, x_scale_stride_C)
            if COLUMNS > 1:
                scale_1_T = _scale(x_scales_T, tile_scale_ptr, column + 1, num_columns, x_scale_stride_C)
            if COLUMNS > 2:
                scale_2_T = _scale(x_scales_T, tile_scale_ptr, column + 2, num_columns, x_scale_stride_C)
                scale_3_T = _scale(x_scales_T, tile_scale_ptr, column + 3, num_columns, x_scale_stride_C)
        mbarrier.wait(full.index(turn), (done // STAGES) & 1)
        sum_0_C = _product(weights, xs, place, C, sum_dtype, ROWS, TOKENS)
        if COLUMNS == 1:
            sum_0_C = warpgroup_mma_wait(0, deps=(sum_0_C,))
        elif COLUMNS == 2:
            sum_1_C = _product(weights, xs, place + 1, C, sum_dtype, ROWS, TOKENS)
            sum_0_C, sum_1_C = warpgroup_mma_wait(0, deps=(sum_0_C, sum_1_C))
        else:
            sum_1_C = _product(weights, xs, place + 1, C, sum_dtype, ROWS, TOKENS)
            sum_2_C = _product(weights, xs, place + 2, C, sum_dtype, ROWS, TOKENS)
            sum_3_C = _product(weights, xs, place + 3, C, sum_dtype, ROWS, TOKENS)
            sum_0_C, sum_1_C, sum_2_C, sum_3_C = warpgroup_mma_wait(0, deps=(sum_0_C, sum_1_C, sum_2_C, sum_3_C))
        if done + STAGES < count:
            await_threads()
            step = first + done + STAGES
            mbarrier.expect(full.index(turn), STEP_BYTES)
            _load(weight_map, tile * ROWS, step, full.index(turn), weights, turn, COLUMNS, BLOCK)
            _load(x_map, 0, step, full.index(turn), xs, turn, COLUMNS, BLOCK)
        sum_C = _add(sum_C, sum_0_C, scale_0_T, BLOCKED)
        if COLUMNS > 1:
            sum_C = _add(sum_C, sum_1_C, scale_1_T, BLOCKED)
        if COLUMNS > 2:
            sum_C = _add(sum_C, sum_2_C, scale_2_T, BLOCKED)
            sum_C = _add(sum_C, sum_3_C, scale_3_T, BLOCKED)
    in_C = (tokens_T < num_tokens)[None, :] & (rows_N < num_rows)[:, None]
    is_last = True
    if partial_ptr is not None:
        SIZE: gl.constexpr = ROWS * TOKENS
        parts_C = partial_ptr + gl.arange(0, ROWS, gl.SliceLayout(1, C))[:, None] * TOKENS + tokens_T[None, :]
        parts_C += tile * splits * SIZE
        gl.store(parts_C + part * SIZE, sum_C, mask=in_C)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        await_threads()
        is_last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            sum_C = gl.zeros([ROWS, TOKENS], sum_dtype, C)
            for each in range(0, splits, 2):
                sum_C += gl.load(parts_C + each * SIZE, mask=in_C, other=0, cache_modifier=".cg")
                exists_C = in_C & (each + 1 < splits)
                sum_C += gl.load(parts_C + (each + 1) * SIZE, mask=exists_C, other=0, cache_modifier=".cg")
            gl.store(arrived_ptr + tile, 0)
    if is_last:
        result_C = sum_C.to(gl.float32)
        if not BLOCKED:
            scale_N = gl.load(scale_ptr + read_N // ROWS_PER_SCALE)
            result_C *= scale_N[:, None] * gl.load(x_scale_ptr + read_T)[None, :]
        if bias_ptr is not None:
            result_C += gl.load(bias_ptr + read_N).to(gl.float32)[:, None]
        out_C = out_ptr + tokens_T.to(gl.int64)[None, :] * num_rows + rows_N[:, None]
        gl.store(out_C, result_C.to(out_ptr.dtype.element_ty), mask=in_C)


@gluon.jit
def _load(matrix, row, step, full, tiles, stage, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):
    """Starts the copies of a step's blocks. Numbers past the last row or channel are read as 0."""
    for each in gl.static_range(COLUMNS):
        place = [row, (step * COLUMNS + each) * BLOCK]
        tma.async_copy_global_to_shared(matrix, place, full, tiles.index(stage * COLUMNS + each))


@gluon.jit
def _product(weights, xs, place, C: gl.constexpr, sum_dtype: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    """Starts the product of one block of channels."""
    zeros_C = gl.zeros([ROWS, TOKENS], sum_dtype, C)
    x = xs.index(place).permute((1, 0))
    return warpgroup_mma(weights.index(place), x, zeros_C, use_acc=False, is_async=True)


@gluon.jit
def _scale(x_scales_T, scale_ptr, column, num_columns, x_scale_stride_C):
    # A step may end past the last block, with zeros.
    column = gl.minimum(column, num_columns - 1)
    return gl.load(x_scales_T + column * x_scale_stride_C) * gl.load(scale_ptr + column)


@gluon.jit
def _add(sum_C, product_C, scale_T, BLOCKED: gl.constexpr):
    if BLOCKED:
        product_C = product_C * scale_T[None, :]
    return sum_C + product_C
