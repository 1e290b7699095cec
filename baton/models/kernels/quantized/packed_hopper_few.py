"""The product of few tokens with integers of 4 bits on Hopper, in Gluon: each thread loads the words that it multiplies
straight into registers, one turn ahead, and the first ones while the previous kernel still runs. `packed_few` launches
it.

Legend: `_W`, `_P` as in `packed_hopper_strips`, `_C` in the layout of the result.
"""

# mypy: disable-error-code="assignment,attr-defined,union-attr,var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from baton.models.kernels.quantized.packed_hopper_split import sum_of_tile
from baton.models.kernels.quantized.packed_hopper_strips import (
    LESS,
    STEP_INPUTS,
    STRIP_ROWS,
    WORDS,
    as_operand,
    of_rows,
    output_of,
    pairs_layout,
    rows_layout,
    words_layout,
)
from baton.tritonlib.gluon_launch import await_predecessors, start_dependents


@gluon.jit(do_not_specialize=["num_tokens", "splits"])
def multiply_few(
    x_ptr,
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    x_stride,
    splits,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    STEP: gl.constexpr,
    TOKENS: gl.constexpr,
    STRIPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes STRIPS strips of outputs, or a program's share of their steps, AT_ONCE in a turn.

    Args:
        stored_ptr: int32, a weight in strips.
        zeros_ptr: uint16, those of two outputs each.
        STAGES: turns whose activations are in shared memory or in flight.
    """
    C: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [STRIPS, 1], [16, TOKENS, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // STEP, STEP // 8], [STRIPS, 1], [1, 0])
    ROWS: gl.constexpr = STRIPS * STRIP_ROWS
    tile, split = gl.program_id(0) // splits, gl.program_id(0) % splits
    steps = COLUMNS // STEP
    first, stop = split * steps // splits, (split + 1) * steps // splits
    # Each step of a turn has an allocation of its own, because the compiler puts a barrier between copies to one.
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    inputs = ()
    for _ in gl.static_range(AT_ONCE):
        inputs = inputs + (gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, STEP], SWIZZLED),)
    words, scales, zeros = _load(
        stored_ptr, scales_ptr, zeros_ptr, tile * STRIPS, first, stop, num_rows, COLUMNS, GROUP, STEP, STRIPS, AT_ONCE
    )
    start_dependents(OVERLAP)
    tokens_T = gl.arange(0, TOKENS, gl.SliceLayout(1, COPY))
    exists = (tokens_T < num_tokens)[:, None]
    x = x_ptr + (tokens_T * x_stride)[:, None] + gl.arange(0, STEP, gl.SliceLayout(0, COPY))[None, :]
    await_predecessors(OVERLAP)
    for stage in gl.static_range(STAGES - 1):
        _copy_x(inputs, x, exists, stage, first + stage * AT_ONCE, stop, STEP, AT_ONCE)
        async_copy.commit_group()
    sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    nothing_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
    for step in range(first, stop, AT_ONCE):
        turn = (step - first) // AT_ONCE
        next_words, next_scales, next_zeros = _load(
            stored_ptr,
            scales_ptr,
            zeros_ptr,
            tile * STRIPS,
            step + AT_ONCE,
            stop,
            num_rows,
            COLUMNS,
            GROUP,
            STEP,
            STRIPS,
            AT_ONCE,
        )
        async_copy.wait_group(STAGES - 2)
        _copy_x(inputs, x, exists, (turn + STAGES - 1) % STAGES, step + (STAGES - 1) * AT_ONCE, stop, STEP, AT_ONCE)
        async_copy.commit_group()
        fence_async_shared()
        for one in gl.static_range(AT_ONCE):
            of_step = zeros[one] if zeros_ptr is not None else None
            numbers = as_operand(words[one], of_step, None, STRIPS, STEP // STEP_INPUTS, C)
            x_KT = inputs[one].index(turn % STAGES).permute((1, 0))
            product_C = warpgroup_mma(numbers, x_KT, nothing_C, use_acc=False)
            sum_C += product_C * gl.where(step + one < stop, of_rows(scales[one], C), 0.0)[:, None]
        words, scales, zeros = next_words, next_scales, next_zeros
    async_copy.wait_group(0)
    is_last, sum_C = sum_of_tile(sum_C, partial_ptr, arrived_ptr, tile, split, splits, ROWS, TOKENS, C)
    if is_last:
        rows_C = tile * ROWS + output_of(gl.arange(0, ROWS, gl.SliceLayout(1, C)))
        tokens_C = gl.arange(0, TOKENS, gl.SliceLayout(0, C))
        sum_C *= LESS
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + gl.minimum(rows_C, num_rows - 1)).to(gl.float32)[:, None]
        out_C = out_ptr + tokens_C.to(gl.int64)[None, :] * num_rows + rows_C[:, None]
        gl.store(out_C, sum_C.to(gl.bfloat16), mask=(tokens_C < num_tokens)[None, :] & (rows_C < num_rows)[:, None])


@gluon.jit
def _load(
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    strip,
    step,
    stop,
    num_rows,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    STEP: gl.constexpr,
    STRIPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
):
    """Loads a turn's words, scales and zeros. Steps and strips past the end repeat the last one."""
    LOADS: gl.constexpr = STEP // STEP_INPUTS
    W: gl.constexpr = words_layout(STRIPS, LOADS)
    R: gl.constexpr = rows_layout(STRIPS)
    P: gl.constexpr = pairs_layout(STRIPS, LOADS)
    last = num_rows // STRIP_ROWS - 1
    strips_W = gl.minimum(strip + gl.arange(0, STRIPS, gl.SliceLayout(1, W)), last)
    stored_W = stored_ptr + (strips_W.to(gl.int64) * (COLUMNS * STRIP_ROWS // 8))[:, None]
    stored_W += gl.arange(0, WORDS * LOADS, gl.SliceLayout(0, W))[None, :]
    strips_R = gl.minimum(strip + gl.arange(0, STRIPS, gl.SliceLayout(1, gl.SliceLayout(2, R))), last)
    pairs_R = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, R)))[None, :, None]
    outputs_R = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, R)))[None, None, :]
    rows_R = (strips_R * STRIP_ROWS)[:, None, None] + pairs_R * 2 + outputs_R
    words, scales, zeros = (), (), ()
    for one in gl.static_range(AT_ONCE):
        at = gl.minimum(step + one, stop - 1)
        words = words + (gl.load(stored_W + at * (WORDS * LOADS)),)
        scales = scales + (gl.load(scales_ptr + at * STEP // GROUP * num_rows + rows_R),)
        if zeros_ptr is not None:
            strips_P = gl.minimum(strip + gl.arange(0, STRIPS, gl.SliceLayout(1, P)), last)
            pairs_P = (strips_P * 8)[:, None] + gl.arange(0, 8, gl.SliceLayout(0, P))[None, :]
            zeros = zeros + (gl.load(zeros_ptr + at * STEP // GROUP * (num_rows // 2) + pairs_P),)
    return words, scales, zeros


@gluon.jit
def _copy_x(inputs, x, exists, stage, step, stop, STEP: gl.constexpr, AT_ONCE: gl.constexpr):
    for one in gl.static_range(AT_ONCE):
        places = x + gl.minimum(step + one, stop - 1) * STEP
        async_copy.async_copy_global_to_shared(inputs[one].index(stage), places, mask=exists)
