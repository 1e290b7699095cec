"""Inverts the triangular systems of the delta rule's sub-chunks, for `gated_delta_systems`. Legend: as there."""

import triton
import triton.language as tl
from torch import Tensor

from baton.models.kernels.recurrent.prompt_tiles import find_sub_chunk
from baton.models.kernels.recurrent.state_rows import StateRows


def invert(systems_THRJ: Tensor, inverses_THRJ: Tensor, rows: StateRows, *, tiles: int) -> None:
    """Writes the inverse of each sub-chunk's system.

    Args:
        systems_THRJ: float32, contiguous; without the diagonal, and undefined above it.
        tiles: at least as many as the prompts have sub-chunks.
    """
    _, heads, per_head, chunk = systems_THRJ.shape
    value_heads = heads * per_head
    _invert[(tiles, value_heads)](
        systems_THRJ,
        inverses_THRJ,
        rows.prompt_slots_P,
        rows.prompt_starts_P1,
        rows.prompt_context_P,
        len(rows.prompt_slots_P),
        VALUE_HEADS=value_heads,
        CHUNK=chunk,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["num_prompts"])
def _invert(
    systems_ptr,
    inverses_ptr,
    slots_ptr,
    starts_ptr,
    context_ptr,
    num_prompts,
    VALUE_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes the inverse of one sub-chunk's system: first of its four diagonal blocks, then block by block
    away from the diagonal (block forward substitution). One warp: no product waits for other warps."""
    tl.static_assert(CHUNK == 64, "the blocks below are of 16 tokens")
    first, count = find_sub_chunk(slots_ptr, starts_ptr, context_ptr, num_prompts, CHUNK)
    if count > 0:
        gate = first.to(tl.int64) * VALUE_HEADS + tl.program_id(1)
        rows_I1 = (tl.arange(0, 16) * (VALUE_HEADS * CHUNK))[:, None]
        ptrs_IJ = systems_ptr + gate * CHUNK + rows_I1 + tl.arange(0, 16)[None, :]
        out_ptrs_IJ = inverses_ptr + gate * CHUNK + rows_I1 + tl.arange(0, 16)[None, :]
        dtype: tl.constexpr = inverses_ptr.dtype.element_ty
        down: tl.constexpr = 16 * VALUE_HEADS * CHUNK
        has0_I1, has1_I1, has2_I1, has3_I1 = (
            _rows_of(count),
            _rows_of(count - 16),
            _rows_of(count - 32),
            _rows_of(count - 48),
        )
        zeros_IJ = tl.zeros([16, 16], dtype)
        tl.store(out_ptrs_IJ + 16, zeros_IJ, mask=has0_I1)
        tl.store(out_ptrs_IJ + 32, zeros_IJ, mask=has0_I1)
        tl.store(out_ptrs_IJ + 48, zeros_IJ, mask=has0_I1)
        tl.store(out_ptrs_IJ + down + 32, zeros_IJ, mask=has1_I1)
        tl.store(out_ptrs_IJ + down + 48, zeros_IJ, mask=has1_I1)
        tl.store(out_ptrs_IJ + 2 * down + 48, zeros_IJ, mask=has2_I1)
        below10_IJ = tl.load(ptrs_IJ + down, mask=has1_I1, other=0.0)
        below20_IJ = tl.load(ptrs_IJ + 2 * down, mask=has2_I1, other=0.0)
        below21_IJ = tl.load(ptrs_IJ + 2 * down + 16, mask=has2_I1, other=0.0)
        below30_IJ = tl.load(ptrs_IJ + 3 * down, mask=has3_I1, other=0.0)
        below31_IJ = tl.load(ptrs_IJ + 3 * down + 16, mask=has3_I1, other=0.0)
        below32_IJ = tl.load(ptrs_IJ + 3 * down + 32, mask=has3_I1, other=0.0)
        block00_IJ = _inverse(tl.load(ptrs_IJ, mask=has0_I1, other=0.0))
        block11_IJ = _inverse(tl.load(ptrs_IJ + down + 16, mask=has1_I1, other=0.0))
        block22_IJ = _inverse(tl.load(ptrs_IJ + 2 * down + 32, mask=has2_I1, other=0.0))
        block33_IJ = _inverse(tl.load(ptrs_IJ + 3 * down + 48, mask=has3_I1, other=0.0))
        tl.store(out_ptrs_IJ, block00_IJ.to(dtype), mask=has0_I1)
        tl.store(out_ptrs_IJ + down + 16, block11_IJ.to(dtype), mask=has1_I1)
        tl.store(out_ptrs_IJ + 2 * down + 32, block22_IJ.to(dtype), mask=has2_I1)
        tl.store(out_ptrs_IJ + 3 * down + 48, block33_IJ.to(dtype), mask=has3_I1)
        block10_IJ = -_times(block11_IJ, _times(below10_IJ, block00_IJ))
        block21_IJ = -_times(block22_IJ, _times(below21_IJ, block11_IJ))
        block32_IJ = -_times(block33_IJ, _times(below32_IJ, block22_IJ))
        tl.store(out_ptrs_IJ + down, block10_IJ.to(dtype), mask=has1_I1)
        tl.store(out_ptrs_IJ + 2 * down + 16, block21_IJ.to(dtype), mask=has2_I1)
        tl.store(out_ptrs_IJ + 3 * down + 32, block32_IJ.to(dtype), mask=has3_I1)
        block20_IJ = -_times(block22_IJ, _times(below20_IJ, block00_IJ) + _times(below21_IJ, block10_IJ))
        block31_IJ = -_times(block33_IJ, _times(below31_IJ, block11_IJ) + _times(below32_IJ, block21_IJ))
        tl.store(out_ptrs_IJ + 2 * down, block20_IJ.to(dtype), mask=has2_I1)
        tl.store(out_ptrs_IJ + 3 * down + 16, block31_IJ.to(dtype), mask=has3_I1)
        answer30_IJ = _times(below30_IJ, block00_IJ) + _times(below31_IJ, block10_IJ) + _times(below32_IJ, block20_IJ)
        tl.store(out_ptrs_IJ + 3 * down, (-_times(block33_IJ, answer30_IJ)).to(dtype), mask=has3_I1)


@triton.jit
def _rows_of(count):
    return (tl.arange(0, 16) < count)[:, None]


@triton.jit
def _times(x_IJ, y_IJ):
    """The product of numbers that do not exceed 1 by much, each as the sum of two in float16: 22 binary digits."""
    high_IJ, other_high_IJ = x_IJ.to(tl.float16), y_IJ.to(tl.float16)
    low_IJ = (x_IJ - high_IJ.to(tl.float32)).to(tl.float16)
    other_low_IJ = (y_IJ - other_high_IJ.to(tl.float32)).to(tl.float16)
    return tl.dot(high_IJ, other_high_IJ, tl.dot(high_IJ, other_low_IJ, tl.dot(low_IJ, other_high_IJ)))


@triton.jit
def _inverse(below_IJ):
    """The inverse of 1 + `below_IJ` of 16 tokens, which is 0 on and above the diagonal: first that of each block of two
    tokens on the diagonal, then of blocks twice as large, each from the inverses of its halves."""
    i_I1, j_1J = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse_IJ = (i_I1 == j_1J).to(tl.float32) - tl.where(i_I1 // 2 == j_1J // 2, below_IJ, 0.0)
    for level in tl.static_range(1, 4):
        is_between_IJ = (i_I1 >> level != j_1J >> level) & (i_I1 >> (level + 1) == j_1J >> (level + 1))
        inverse_IJ -= _times(inverse_IJ, _times(tl.where(is_between_IJ, below_IJ, 0.0), inverse_IJ))
    return inverse_IJ
