"""Products of quantized activations with fp8 weights by torch's library: the weights that it supports, its layout of
scales, and the number of tokens from which it is faster than `fp8_gemm`. It never waits for the device and can be
captured, but a token's bits depend on the number of tokens.

Legend: P tokens and padding, N output channels, K input channels, C columns of scales.
"""

import torch
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.kernels.quantized.fp8_gemm import Weight

# With blocks, the number of tokens must be a multiple of this.
TOKENS = 4
# Both sizes of a weight must be multiples of this. With blocks, a column of the weight's scales must be one too.
_ALIGNMENT = 16
_ALIGNED_COLUMNS = _ALIGNMENT // 4
# First CUDA version whose cuBLAS takes scales of blocks, on Hopper only.
_MIN_CUDA = (12, 9)
# Our kernel is faster up to 32 tokens, and up to 64 for weights with a scale per row. With blocks it is faster up to 64
# only for weights of few rows, where it splits channels over programs and the library does not. On an H200, us for 64
# tokens, with quantizing, ours and the library's: 4096 rows of 14336 channels 36 and 43, 2112 of 7168 19 and 24; 7168
# of 16384 62 and 50, 28672 of 4096 41 and 38.
_MIN_TOKENS = 65
_MIN_TOKENS_OF_MANY_ROWS = 33
_MANY_ROWS = 5120


def takes(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether the library supports this product, on a GPU that multiplies fp8."""
    rows, channels = weight.stored_NK.shape
    if dtype is not torch.bfloat16 or rows % _ALIGNMENT or channels % _ALIGNMENT:
        return False
    if weight.scale_RC.shape[1] == 1:
        return weight.rows_per_scale == 1
    return (
        weight.rows_per_scale == FP8_BLOCK
        and channels % (_ALIGNED_COLUMNS * FP8_BLOCK) == 0
        and weight.bias is None
        and has_blocks(weight.stored_NK.device)
    )


def has_blocks(device: torch.device) -> bool:
    """Whether the library takes one scale for every 128 channels of a token and for every block of a weight."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    major, minor = torch.version.cuda.split(".")[:2]
    return torch.cuda.get_device_capability(device) == (9, 0) and (int(major), int(minor)) >= _MIN_CUDA


def is_faster(num_tokens: int, weight: Weight) -> bool:
    """Whether the library is faster than our kernel; depends on shapes alone."""
    many_rows = weight.rows_per_scale == FP8_BLOCK and weight.stored_NK.shape[0] > _MANY_ROWS
    return num_tokens >= (_MIN_TOKENS_OF_MANY_ROWS if many_rows else _MIN_TOKENS)


def multiply(x_PK: Tensor, x_scale_PC: Tensor, weight: Weight, *, dtype: torch.dtype) -> Tensor:
    """Multiplies by a weight that the library supports; returns [P, N] in `dtype`.

    Args:
        x_PK: e4m3, contiguous; with blocks, P a multiple of `TOKENS`.
        x_scale_PC: as `fp8_gemm.multiply` takes them.
    """
    out_PN: Tensor = torch._scaled_mm(
        x_PK,
        weight.stored_NK.T,
        scale_a=x_scale_PC,
        scale_b=weight.scale_RC.T,
        bias=weight.bias,
        out_dtype=dtype,
        # False keeps sums of more than 128 channels in float32 outside the tensor cores.
        use_fast_accum=False,
    )
    return out_PN
