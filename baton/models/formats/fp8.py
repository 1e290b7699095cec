"""fp8 weights and activations in plain torch. These twins of the kernels run where there are no kernels.

Legend: T token, P token or padding, N output channel, K input channel, R row of scales, C column of scales.
"""

import torch
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 1e-10  # lower bound of the number from which a scale is computed, so that zeros get an invertible scale


def dequantize_blocks(weight_NK: Tensor, scale_RC: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Multiplies each block of 128 by 128 fp8 weights by its scale; blocks at the edges may be smaller."""
    return dequantize_rows(weight_NK, scale_RC, rows_per_scale=FP8_BLOCK, dtype=dtype)


def dequantize_rows(weight_NK: Tensor, scale_RC: Tensor, *, rows_per_scale: int, dtype: torch.dtype) -> Tensor:
    """Multiplies fp8 weights by their scales; `rows_per_scale` rows share a scale.

    Args:
        scale_RC: one column, or one for every 128 columns of the weight.
    """
    rows, columns = weight_NK.shape
    scale_NC = scale_RC.repeat_interleave(rows_per_scale, dim=0)[:rows]
    if scale_NC.shape[1] > 1:
        scale_NC = scale_NC.repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    return (weight_NK.float() * scale_NC).to(dtype)


def quantize_blocks(x_TK: Tensor, *, power_of_two: bool = False, multiple_of: int = 1) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [P, K], scales [P, C] float32 with tokens adjacent), one scale for every 128 channels of a token.

    Args:
        multiple_of: tokens of zeros are added until P is a multiple of this.
    """
    tokens, channels = x_TK.shape
    columns, padded = -(-channels // FP8_BLOCK), -(-tokens // multiple_of) * multiple_of
    padded_PK = x_TK.new_zeros(padded, columns * FP8_BLOCK, dtype=torch.float32)
    padded_PK[:tokens, :channels] = x_TK
    grouped_PCB = padded_PK.view(padded, columns, FP8_BLOCK)
    scale_PC, inverse_PC = _scales(grouped_PCB.abs().amax(dim=-1), power_of_two=power_of_two)
    stored_PK = (grouped_PCB * inverse_PC.unsqueeze(-1)).flatten(1)[:, :channels]
    return _to_e4m3(stored_PK).contiguous(), scale_PC.T.contiguous().T


def quantize_tokens(x_TK: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [T, K], scales [T, 1] float32), one scale for each token."""
    scale_T1, inverse_T1 = _scales(x_TK.float().abs().amax(dim=-1, keepdim=True), power_of_two=power_of_two)
    return _to_e4m3(x_TK.float() * inverse_T1), scale_T1


def quantize_static(x_TK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [T, K], scales [T, 1] float32) by one given scale; larger numbers saturate."""
    return _to_e4m3(x_TK.float() * scale.reciprocal()), scale.expand(x_TK.shape[0], 1).contiguous()


def multiply(x_TK: Tensor, x_scale_TC: Tensor, weight_NK: Tensor, scale_RC: Tensor, *, rows_per_scale: int) -> Tensor:
    """Multiplies quantized activations and weights to [T, N] float32, summed like the kernel: 128 channels at a
    time."""
    out_TN = x_TK.new_zeros(x_TK.shape[0], weight_NK.shape[0], dtype=torch.float32)
    scale_NC = scale_RC.repeat_interleave(rows_per_scale, dim=0)[: weight_NK.shape[0]]
    for column, start in enumerate(range(0, x_TK.shape[1], FP8_BLOCK)):
        part = slice(start, start + FP8_BLOCK)
        product_TN = x_TK[:, part].float() @ weight_NK[:, part].float().T
        x_column, column = min(column, x_scale_TC.shape[1] - 1), min(column, scale_NC.shape[1] - 1)
        out_TN += product_TN * x_scale_TC[:, x_column, None] * scale_NC[None, :, column]
    return out_TN


def _scales(largest: Tensor, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Returns scales and their reciprocals."""
    largest = largest.clamp(min=SMALLEST)
    # NOTE: a tensor, because torch uses a rounded reciprocal to divide by a number on a GPU, and to divide a number by
    # a tensor anywhere. Many bfloat16 numbers lie exactly between two fp8 numbers: the last bit of a scale decides.
    wanted = torch.full_like(largest, E4M3_MAX)
    if not power_of_two:
        return largest / wanted, wanted / largest
    bits = (largest / wanted).view(torch.int32)
    scale = (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)
    return scale, scale.reciprocal()


def _to_e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
