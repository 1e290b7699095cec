"""KV in 8 bits. Writing stores number / scale, rounded to the nearest and saturating at the format's largest finite
number; reading returns stored * scale; NaN stays NaN. Plain torch, the twin of `baton.tritonlib.fp8`.
"""

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in FP8


def quantize(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`values` in a cache's dtype. Only an fp8 cache has a scale; None is 1."""
    if dtype not in FP8:
        return values.to(dtype)
    # A quotient, as in vLLM: times a rounded reciprocal, some numbers are stored one step apart.
    values = values.float() if scale is None else values.float() / scale
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def dequantize(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A cache's numbers in another dtype; the inverse of `quantize`."""
    if dtype == stored.dtype or not is_fp8(stored):
        return stored.to(dtype)
    return (stored.float() if scale is None else stored.float() * scale).to(dtype)
