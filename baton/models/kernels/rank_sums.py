"""Adds up the ranks' parts of a result in the order of the ranks, so that a number's bits depend on its parts alone.

Legend: R rank, N number.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.launch import interpreted
from baton.tritonlib.rounding import round_to

_BLOCK = 1024


def sum_parts(parts: Tensor) -> Tensor:
    """Returns the sum over the first axis in the order of the ranks, in float32, rounded once to the parts' dtype.

    Args:
        parts: [R, ...], contiguous.
    """
    return sum_parts_by_kernel(parts) if parts.is_cuda else sum_parts_in_torch(parts)


def sum_parts_in_torch(parts: Tensor) -> Tensor:
    """Does what `sum_parts` does. `torch.sum` would add in an order that depends on the shape."""
    first, *others = parts.unbind()
    total = first.to(torch.float32, copy=True)
    for other in others:
        total += other
    return total.to(parts.dtype)


def sum_parts_by_kernel(parts: Tensor) -> Tensor:
    """Does what `sum_parts` does, in one launch."""
    out = torch.empty_like(parts[0])
    if out.numel():
        _sum[(triton.cdiv(out.numel(), _BLOCK),)](
            parts, out, out.numel(), RANKS=len(parts), BLOCK=_BLOCK, INTERPRETED=interpreted(), num_warps=4
        )
    return out


@triton.jit(do_not_specialize=["size"])
def _sum(parts_ptr, out_ptr, size, RANKS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    place_N = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists_N = place_N < size
    total_N = tl.load(parts_ptr + place_N, mask=exists_N, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        part_ptrs = parts_ptr + rank * size.to(tl.int64) + place_N
        total_N += tl.load(part_ptrs, mask=exists_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + place_N, round_to(total_N, dtype, INTERPRETED), mask=exists_N)
