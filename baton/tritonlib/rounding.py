"""Rounds float32 to a model's dtype inside kernels, to the nearest, ties to even.

A GPU's casts do that. Triton's interpreter truncates to bfloat16, so there this code rounds the bits.
"""

import triton
import triton.language as tl


@triton.jit
def round_to(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 `values` in `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(values != values, values, rounded.to(tl.float32, bitcast=True)).to(tl.bfloat16)
    return values.to(dtype)
