"""Conversion to and from fp8 inside kernels: to the nearest, ties to even, saturating at the format's largest finite
number; NaN stays NaN. The twin is `baton.kvcache.fp8`.

A GPU has instructions for this. Triton's interpreter casts wrongly (it truncates and loses NaN), so there the bits are
computed.
"""

import triton
import triton.language as tl

_SMALLEST = tl.constexpr(1e-10)  # as in `baton.models.formats.fp8`


@triton.jit
def to_fp8(values, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Converts float32 to tl.float8e4nv or tl.float8e5."""
    LARGEST: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
    # NOTE: comparisons, because minimum and maximum would drop NaN.
    values = tl.where(values > LARGEST, LARGEST, values)
    values = tl.where(values < -LARGEST, -LARGEST, values)
    if INTERPRETED:
        return _to_bits(values, dtype == tl.float8e4nv).to(dtype, bitcast=True)
    return values.to(dtype)


@triton.jit
def from_fp8(stored, INTERPRETED: tl.constexpr):
    """Converts to float32, exactly."""
    if INTERPRETED:
        return _from_bits(stored.to(tl.uint8, bitcast=True), stored.dtype == tl.float8e4nv)
    return stored.to(tl.float32)


@triton.jit
def scales_of(largest, POWER_OF_TWO: tl.constexpr):
    """Returns scales that map the largest numbers to e4m3's largest, 448, and their reciprocals, in float32 with exact
    division."""
    largest = tl.maximum(largest, _SMALLEST)
    scale = tl.div_rn(largest, 448.0)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
        return scale, tl.div_rn(1.0, scale)
    return scale, tl.div_rn(448.0, largest)


@triton.jit
def scale_of(k, scale_ptr, v_scale_ptr):
    """The scale of keys or latents (k = 0), or of values; 1 without a pointer."""
    scale = 1.0 if scale_ptr is None else tl.load(scale_ptr)
    v_scale = 1.0 if v_scale_ptr is None else tl.load(v_scale_ptr)
    return tl.where(k == 0, scale, v_scale)


@triton.jit
def _to_bits(values, E4M3: tl.constexpr):
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    BIAS: tl.constexpr = 7 if E4M3 else 15
    DROPPED: tl.constexpr = 23 - MANTISSA
    # The power of two whose last float32 bit has the same value as the last bit of subnormal fp8 numbers.
    ROUNDER: tl.constexpr = 24 - BIAS - MANTISSA
    bits = values.to(tl.uint32, bitcast=True)
    size = tl.where(values != values, 0.0, tl.abs(values))
    size_bits = size.to(tl.uint32, bitcast=True)
    with_one = (size_bits + ((1 << (DROPPED - 1)) - 1) + ((size_bits >> DROPPED) & 1)) >> DROPPED
    with_one -= (127 - BIAS) << MANTISSA
    without_one = (size + 2.0**ROUNDER).to(tl.uint32, bitcast=True) - ((127 + ROUNDER) << 23)
    code = tl.where(size < 2.0 ** (1 - BIAS), without_one, with_one)
    code = tl.where(values != values, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _from_bits(code, E4M3: tl.constexpr):
    MANTISSA: tl.constexpr = 3 if E4M3 else 2
    BIAS: tl.constexpr = 7 if E4M3 else 15
    bits = code.to(tl.uint32)
    size_bits = bits & 0x7F
    # The exponent is too small by a constant, which the factor corrects, for subnormal numbers too.
    size = (size_bits << (23 - MANTISSA)).to(tl.float32, bitcast=True) * 2.0 ** (127 - BIAS)
    if E4M3:
        size = tl.where(size_bits == 0x7F, float("nan"), size)
    else:
        size = tl.where(size_bits > 0x7C, float("nan"), tl.where(size_bits == 0x7C, float("inf"), size))
    return tl.where(bits > 0x7F, -size, size)
