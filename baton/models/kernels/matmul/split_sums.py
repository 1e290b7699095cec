"""Sums shared among programs. Each program stores its part of a tile, and the last to arrive adds up the parts, always
in the order of the programs.

A tile's parts lie one after the other. Its counter, one of a tensor, is 0 before and after.
"""

import triton
import triton.language as tl

from baton.tritonlib.launch import bound


@triton.jit
def leave_part(part_ptrs, part, mask, counters_ptr, tile):
    """Stores a program's part; returns how many programs arrived before, which is one less than all for the last."""
    tl.store(part_ptrs, part, mask=mask)
    # NOTE: all threads' stores come before the one thread's count; without the barrier, partial sums get lost.
    tl.debug_barrier()
    return tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")


@triton.jit
def add_parts(first_ptrs, counters_ptr, tile, splits, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Adds up the parts; `first_ptrs` points to the first part. The last program calls it."""
    SIZE: tl.constexpr = first_ptrs.shape[0] * first_ptrs.shape[1]
    total = tl.zeros(first_ptrs.shape, dtype)
    for part in range(bound(splits, INTERPRETED)):
        total += tl.load(first_ptrs + part * SIZE, cache_modifier=".cg")
    tl.store(counters_ptr + tile, 0)
    return total
