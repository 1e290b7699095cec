"""How the decode kernels load keys and values of 8 bits, and prefetch the first ones.

Legend: L lines of L2.
"""

import triton
import triton.language as tl

from baton.tritonlib.launch import prefetch

# Number of tiles prefetched while the previous kernel runs: as many as the loop has in flight.
_TILES_AHEAD = tl.constexpr(2)


@triton.jit
def in_half(values):
    """Converts 8-bit numbers to float16, four per pair of instructions."""
    # NOTE: declared impure, so that the compiler does not move it after the conversion to a product's layout. It would
    # load byte by byte there, because a column's numbers are not adjacent. The kernel takes 178 us instead of 271.
    CONVERT: tl.constexpr = "cvt.rn.f16x2.e4m3x2" if values.dtype == tl.float8e4nv else "cvt.rn.f16x2.e5m2x2"
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; " + CONVERT + " $0, low; " + CONVERT + " $1, high; }",
        "=r,=r,r",
        [values],
        dtype=tl.float16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def prefetch_keys(
    k_ptr,
    v_ptr,
    table_ptr,
    start,
    key_stop,
    any_keys,
    stride_kv_b,
    stride_kv_n,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Loads the first tiles' keys and values into L2. The newest token's may not be written yet."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(HEAD_SIZE, LINE))
    lines_L = tl.arange(0, _TILES_AHEAD * TILE_KEYS * LINES)
    keys_L = tl.where(any_keys, tl.minimum(start + lines_L // LINES, key_stop - 1), 0)
    blocks_L = tl.load(table_ptr + keys_L // BLOCK_SIZE, mask=any_keys, other=0)
    places_L = blocks_L.to(tl.int64) * stride_kv_b + keys_L % BLOCK_SIZE * stride_kv_n
    places_L += tl.minimum(lines_L % LINES * LINE, HEAD_SIZE - 1)
    prefetch(k_ptr + places_L)
    prefetch(v_ptr + places_L)
