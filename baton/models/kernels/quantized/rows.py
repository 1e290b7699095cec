"""Rows of activations that are quantized for one linear layer: how the layer reads them, and how kernels that compute
rows, such as a norm's, store them.

A kernel that stores rows quantized writes the bits that it would write to a tensor in the model's dtype and that a
kernel of `fp8_quantize` or `int8_gemm` would then make of this tensor.

Legend: T tokens, P those and padding, K channels, C columns of scales, B channels of a column.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.kernels.quantized import fp8_quantize, int8_gemm
from baton.models.kernels.quantized.int8_gemm import scale_of, to_int8
from baton.tritonlib.fp8 import scales_of, to_fp8

_BLOCK = tl.constexpr(FP8_BLOCK)


@dataclass(frozen=True)
class RowFormat:
    """How a linear layer reads its input.

    Attributes:
        dtype: e4m3 or int8.
        blocked: one scale for every 128 channels of a token, else one for all. For e4m3.
        power_of_two: scales are rounded up to powers of two. For e4m3.
        scale: float32, one number on the device that scales all tokens; None: each has its own scales.
        multiple_of: with blocks, rows of zeros are added until their number is a multiple of this.
    """

    dtype: torch.dtype
    blocked: bool = False
    power_of_two: bool = False
    scale: Tensor | None = None
    multiple_of: int = 1

    @property
    def needs_whole_rows(self) -> bool:
        """Whether a scale depends on all channels of a token."""
        return not self.blocked and self.scale is None


@dataclass(frozen=True)
class QuantizedRows:
    """Activations as a linear layer reads them.

    Attributes:
        stored_PK: contiguous.
        scale_PC: float32; tokens adjacent in memory.
        num_tokens: without padding.
        dtype: of the activations before, and of the layer's result.
    """

    stored_PK: Tensor
    scale_PC: Tensor
    num_tokens: int
    dtype: torch.dtype


def quantize(x_TK: Tensor, row_format: RowFormat) -> QuantizedRows:
    """Quantizes a tensor by a kernel of its own. Rows may have any stride."""
    if row_format.dtype is torch.int8:
        stored_PK, scale_PC = int8_gemm.quantize_tokens(x_TK, row_format.scale)
    elif row_format.blocked:
        stored_PK, scale_PC = fp8_quantize.quantize_blocks(
            x_TK, power_of_two=row_format.power_of_two, multiple_of=row_format.multiple_of
        )
    elif row_format.scale is not None:
        stored_PK, scale_PC = fp8_quantize.quantize_static(x_TK, row_format.scale)
    else:
        stored_PK, scale_PC = fp8_quantize.quantize_tokens(x_TK, power_of_two=row_format.power_of_two)
    return QuantizedRows(stored_PK, scale_PC, x_TK.shape[0], x_TK.dtype)


def allocate(num_tokens: int, channels: int, row_format: RowFormat, like: Tensor) -> QuantizedRows:
    """Returns memory for rows that a kernel stores.

    Args:
        like: has the device and the dtype of the activations.
    """
    padded, columns = num_tokens, 1
    if row_format.blocked:
        padded = triton.cdiv(num_tokens, row_format.multiple_of) * row_format.multiple_of
        columns = triton.cdiv(channels, FP8_BLOCK)
    stored_PK = torch.empty(padded, channels, dtype=row_format.dtype, device=like.device)
    scale_CP = torch.empty(columns, padded, dtype=torch.float32, device=like.device)
    return QuantizedRows(stored_PK, scale_CP.T, num_tokens, like.dtype)


@triton.jit
def store_quantized(
    x_K,
    row,
    num_rows,
    first,
    stored_ptr,
    scale_ptr,
    given_scale_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Quantizes and stores `WIDTH` channels of one row of `SIZE`, and their scales.

    Args:
        x_K: float32, as rounded to the model's dtype; zeros past the row's end.
        num_rows: with padding.
        first: first channel, a multiple of `WIDTH`. It is 0 unless scales are `BLOCKED` or given.
    """
    # NOTE: stores have a shape of their own. If it were that of the caller's loads, the compiler would choose one
    # layout for all, and a norm would add up its channels in another order than without quantizing.
    COLUMN: tl.constexpr = min(WIDTH, _BLOCK)
    x_CB = tl.reshape(x_K, [WIDTH // COLUMN, COLUMN])
    columns_C = first // COLUMN + tl.arange(0, WIDTH // COLUMN)
    channels_CB = columns_C[:, None] * COLUMN + tl.arange(0, COLUMN)[None, :]
    stored_ptrs = stored_ptr + row * SIZE + channels_CB
    if BLOCKED:
        scale_C, inverse_C = scales_of(tl.max(tl.abs(x_CB), axis=1), POWER_OF_TWO)
        stored_CB = to_fp8(x_CB * inverse_C[:, None], tl.float8e4nv, INTERPRETED)
        scale_ptrs = scale_ptr + columns_C.to(tl.int64) * num_rows + row
        tl.store(scale_ptrs, scale_C, mask=columns_C * COLUMN < SIZE)
    else:
        largest = tl.max(tl.max(tl.abs(x_CB), axis=1), axis=0)
        if stored_ptr.dtype.element_ty == tl.int8:
            scale = scale_of(largest) if given_scale_ptr is None else tl.load(given_scale_ptr)
            stored_CB = to_int8(x_CB, scale)
        else:
            if given_scale_ptr is None:
                scale, inverse = scales_of(largest, POWER_OF_TWO)
            else:
                scale = tl.load(given_scale_ptr)
                inverse = tl.div_rn(1.0, scale)
            stored_CB = to_fp8(x_CB * inverse, tl.float8e4nv, INTERPRETED)
        tl.store(scale_ptr + row, scale, mask=first == 0)
    tl.store(stored_ptrs, stored_CB, mask=channels_CB < SIZE)
