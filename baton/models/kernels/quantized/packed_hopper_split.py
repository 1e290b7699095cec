"""Tiles that programs share on Hopper, in Gluon; `baton.models.kernels.matmul.split_sums` is the Triton version."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from baton.tritonlib.gluon_launch import await_warps

# Parts that are in flight at once while they are added up.
AT_ONCE = gl.constexpr(4)


@gluon.jit
def sum_of_tile(
    sum_C,
    partial_ptr,
    arrived_ptr,
    tile,
    split,
    splits,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    C: gl.constexpr,
):
    """Returns (whether this program has the tile's sum, that sum). The last program to arrive adds up all parts in the
    order of the programs.

    Args:
        sum_C: [ROWS, TOKENS], this program's part.
        partial_ptr: float32, for the parts of all programs; None: each tile has one program.
    """
    is_last = True
    if partial_ptr is not None:
        places_C = tile * splits * (ROWS * TOKENS) + gl.arange(0, ROWS, gl.SliceLayout(1, C))[:, None] * TOKENS
        places_C += gl.arange(0, TOKENS, gl.SliceLayout(0, C))[None, :]
        gl.store(partial_ptr + places_C + split * (ROWS * TOKENS), sum_C)
        # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
        await_warps()
        is_last = gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
        if is_last:
            sum_C = gl.zeros([ROWS, TOKENS], gl.float32, C)
            for some in range(0, splits, AT_ONCE):
                for one in gl.static_range(AT_ONCE):
                    place = gl.minimum(some + one, splits - 1) * (ROWS * TOKENS)
                    part_C = gl.load(partial_ptr + places_C + place, cache_modifier=".cg")
                    sum_C += gl.where(some + one < splits, part_C, 0.0)
            gl.store(arrived_ptr + tile, 0)
    return is_last, sum_C
