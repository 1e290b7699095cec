"""KV in 8 bits: stored = number / scale, to the nearest and saturating at the format's largest finite number; read =
stored * scale. NaN stays NaN. Plain torch, the twin of `tritonlib.fp8`; knows no cache."""

import torch
from torch import Tensor

from kvcache.kernels.blocks import convert

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fp8(tensor: Tensor) -> bool:
    return tensor.dtype in FP8


def quantize(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`values` in a cache's dtype; only an fp8 cache has a scale, and None is 1."""
    if dtype not in FP8:
        return values.to(dtype)
    # The kernels do the same: a product costs less than a quotient, and there are many numbers to one scale.
    values = values.float() if scale is None else values.float() * scale.reciprocal()
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def dequantize(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache holds, in another dtype; the inverse of `quantize`."""
    if dtype == stored.dtype or not is_fp8(stored):
        return stored.to(dtype)
    return (stored.float() if scale is None else stored.float() * scale).to(dtype)


def convert_kv(
    source_KBNHC: Tensor, target_KBNHC: Tensor, *, scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    """Writes one layer's numbers into another of the same shape and any layout, in its dtype.

    Args:
        scale, v_scale: float32 scalars on the device, of the side that is fp8: of keys or latents, and of values. None
            is 1; where both sides are fp8 they have the same.
    """
    if source_KBNHC.is_cuda:
        convert(source_KBNHC, target_KBNHC, scale=scale, v_scale=v_scale)
        return
    both = is_fp8(source_KBNHC) and is_fp8(target_KBNHC)
    for k, scale_k in zip(range(source_KBNHC.shape[0]), (None, None) if both else (scale, v_scale), strict=False):
        numbers = dequantize(source_KBNHC[k], scale_k, torch.float32)
        target_KBNHC[k].copy_(quantize(numbers, scale_k, target_KBNHC.dtype))
