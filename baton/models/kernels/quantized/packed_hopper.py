"""Products of experts with weights of integers of 4 bits on Hopper, in Gluon.

Legend: `_X` and `_C` are in the layouts of the activations and the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.models.kernels.quantized.packed_hopper_sum import packed_sum
from baton.tritonlib.gluon_launch import await_predecessors, start_dependents

WARPS = 4


@gluon.jit(do_not_specialize=["num_tiles"])
def multiply_packed_experts(
    x_ptr,
    stored_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    weights_ptr,
    order_ptr,
    tiles_ptr,
    out_ptr,
    num_tiles,
    x_stride,
    CHOICES: gl.constexpr,
    IS_FIRST: gl.constexpr,
    OUT: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    AT_ONCE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes a tile of an expert's outputs, like the kernel in `baton.models.kernels.quantized.packed_experts`; tiles
    of tokens with the same block of weights are neighbours."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    X: gl.constexpr = gl.DotOperandLayout(1, C, 8)
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    tile, block = gl.program_id(0) % num_tiles, gl.program_id(0) // num_tiles
    expert = gl.load(tiles_ptr + tile).to(gl.int64)
    if expert >= 0:
        first = tile
        stop = tile + 1
        if order_ptr is not None:
            first = gl.load(tiles_ptr + num_tiles + tile)
            stop = gl.load(tiles_ptr + 2 * num_tiles + tile)
        places_X = gl.minimum(first + gl.arange(0, TOKENS, gl.SliceLayout(0, X)), stop - 1)
        rows_X = places_X
        if IS_FIRST:
            if order_ptr is not None:
                rows_X = gl.load(order_ptr + places_X)
            rows_X = rows_X // CHOICES
        groups: gl.constexpr = (COLUMNS + GROUP - 1) // GROUP
        if zeros_ptr is not None:
            zeros_ptr += expert * (OUT * groups)
        sum_C = packed_sum(
            stored_ptr + expert * (OUT * (COLUMNS // 2)),
            scales_ptr + expert * (OUT * groups),
            zeros_ptr,
            x_ptr + rows_X.to(gl.int64) * x_stride,
            block * ROWS,
            OUT,
            0,
            COLUMNS // STEP,
            COLUMNS,
            GROUP,
            ROWS,
            TOKENS,
            STEP,
            AT_ONCE,
            STAGES,
        )
        rows_C = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, C))
        places_C = first + gl.arange(0, TOKENS, gl.SliceLayout(0, C))
        exists_C = places_C < stop
        assignments_C = places_C
        if order_ptr is not None:
            assignments_C = gl.load(order_ptr + places_C, mask=exists_C, other=0)
        if bias_ptr is not None:
            sum_C += gl.load(bias_ptr + expert * OUT + gl.minimum(rows_C, OUT - 1)).to(gl.float32)[:, None]
        if weights_ptr is not None:
            sum_C *= gl.load(weights_ptr + assignments_C, mask=exists_C, other=0.0)[None, :]
        into_C = places_C if IS_FIRST else assignments_C
        out_C = out_ptr + into_C.to(gl.int64)[None, :] * OUT + rows_C[:, None]
        gl.store(out_C, sum_C.to(gl.bfloat16), mask=exists_C[None, :] & (rows_C < OUT)[:, None])
