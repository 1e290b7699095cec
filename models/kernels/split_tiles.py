"""Parts of kernels whose programs share a tile of a product's result: who has which steps of its channels, weights that
come early, and partial sums that are added up in a fixed order.

A step is one block of a tile's channels. Legend: M tokens, N rows of the weight, P pieces prefetched.
"""

import triton
import triton.language as tl

from tritonlib.launch import bound

# Partial sums that are in flight at once while they are added up.
_AT_ONCE = tl.constexpr(4)


@triton.jit
def share(part, steps, splits):
    """The first step of a part, and the step after its last; parts differ by one step at most."""
    least = steps // splits
    larger = steps % splits
    first = part * least + tl.minimum(part, larger)
    return first, first + least + (part < larger).to(tl.int32)


@triton.jit
def prefetch_rows(weight_ptr, rows_N, num_channels, columns_P, channels_P):
    """Loads `channels_P` numbers of every row, from each of these columns on, into L2. Weights depend on no earlier
    kernel. The bytes are multiples of 16."""
    SIZE: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    places_NP = rows_N.to(tl.int64)[:, None] * num_channels + columns_P[None, :]
    bytes_NP = tl.broadcast_to((channels_P * SIZE)[None, :], [rows_N.shape[0], columns_P.shape[0]])
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
        "=r,l,r",
        [(weight_ptr + places_NP).to(tl.int64), bytes_NP],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def add_up(ptrs_NM, exists_NM, splits, INTERPRETED: tl.constexpr):
    """Adds up a tile's partial sums, in the order of the programs."""
    SIZE: tl.constexpr = ptrs_NM.shape[0] * ptrs_NM.shape[1]
    sum_NM = tl.load(ptrs_NM, mask=exists_NM, other=0.0, cache_modifier=".cg")
    for some in range(1, bound(splits, INTERPRETED), _AT_ONCE):
        for one in tl.static_range(_AT_ONCE):
            part = some + one
            sum_NM += tl.load(ptrs_NM + part * SIZE, mask=exists_NM & (part < splits), other=0.0, cache_modifier=".cg")
    return sum_NM
