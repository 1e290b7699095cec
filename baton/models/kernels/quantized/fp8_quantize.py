"""Quantizes activations to fp8, for products with fp8 weights: one scale per token, one for every 128 of its channels,
or one for all from the checkpoint. A token's numbers depend on nothing else in the batch. The twin, for a CPU, is
`baton.models.formats.fp8`.

Legend: T tokens, P those and padding, K channels, C columns of scales.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.formats import fp8
from baton.tritonlib.fp8 import scales_of, to_fp8
from baton.tritonlib.launch import await_predecessors, interpreted, overlap, start_dependents

# Blocks of 128 channels in one program: 16 bytes of bf16 in each thread of four warps.
_COLUMNS = 8
_NUM_WARPS = 4


def quantize_blocks(x_TK: Tensor, *, power_of_two: bool = False, multiple_of: int = 1) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [P, K] contiguous, scales [P, C] float32 with tokens adjacent), one scale for every 128 channels.

    Args:
        x_TK: channels adjacent.
        power_of_two: scales are rounded up to powers of two.
        multiple_of: tokens of zeros are added until P is a multiple of this.
    """
    if not x_TK.is_cuda:
        return fp8.quantize_blocks(x_TK, power_of_two=power_of_two, multiple_of=multiple_of)
    return launch_blocks(x_TK, power_of_two=power_of_two, multiple_of=multiple_of)


def quantize_tokens(x_TK: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [T, K] contiguous, scales [T, 1] float32), one scale for each token."""
    if not x_TK.is_cuda:
        return fp8.quantize_tokens(x_TK, power_of_two=power_of_two)
    return launch_tokens(x_TK, None, power_of_two=power_of_two)


def quantize_static(x_TK: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [T, K] contiguous, scales [T, 1] float32) by `scale`, a scalar on the device; larger numbers
    saturate."""
    if not x_TK.is_cuda:
        return fp8.quantize_static(x_TK, scale)
    return launch_tokens(x_TK, scale, power_of_two=False)


def launch_blocks(x_TK: Tensor, *, power_of_two: bool, multiple_of: int = 1) -> tuple[Tensor, Tensor]:
    """Launches the kernel of `quantize_blocks`."""
    num_tokens, channels = x_TK.shape
    padded = triton.cdiv(num_tokens, multiple_of) * multiple_of
    columns = triton.cdiv(channels, FP8_BLOCK)
    stored_PK = torch.empty(padded, channels, dtype=fp8.E4M3, device=x_TK.device)
    scale_CP = torch.empty(columns, padded, dtype=torch.float32, device=x_TK.device)
    if num_tokens:
        _quantize_blocks_kernel[(padded, triton.cdiv(columns, _COLUMNS))](
            x_TK,
            stored_PK,
            scale_CP,
            num_tokens,
            x_TK.stride(0),
            K=channels,
            COLUMNS=_COLUMNS,
            BLOCK=FP8_BLOCK,
            POWER_OF_TWO=power_of_two,
            INTERPRETED=interpreted(),
            **overlap(x_TK.device, rows=num_tokens),
            num_warps=_NUM_WARPS,
        )
    return stored_PK, scale_CP.T


def launch_tokens(x_TK: Tensor, scale: Tensor | None, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Launches the kernel of `quantize_tokens`, and with a scale that of `quantize_static`."""
    tokens, channels = x_TK.shape
    stored_TK = torch.empty(tokens, channels, dtype=fp8.E4M3, device=x_TK.device)
    scale_T1 = torch.empty(tokens, 1, dtype=torch.float32, device=x_TK.device)
    width = triton.next_power_of_2(channels)
    if tokens:
        _quantize_tokens_kernel[(tokens,)](
            x_TK,
            stored_TK,
            scale_T1,
            scale,
            x_TK.stride(0),
            K=channels,
            WIDTH=width,
            POWER_OF_TWO=power_of_two,
            INTERPRETED=interpreted(),
            **overlap(x_TK.device, rows=tokens),
            num_warps=min(max(width // 1024, 1), 16),
        )
    return stored_TK, scale_T1


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_blocks_kernel(
    x_ptr,
    stored_ptr,
    scale_ptr,
    num_tokens,
    stride_T,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    channels_CB = columns_C[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    in_CB = channels_CB < K
    read_CB = in_CB & (token < num_tokens)
    x_CB = tl.load(x_ptr + token * stride_T + channels_CB, mask=read_CB, other=0.0).to(tl.float32)
    scale_C, inverse_C = scales_of(tl.max(tl.abs(x_CB), axis=1), POWER_OF_TWO)
    stored_CB = to_fp8(x_CB * inverse_C[:, None], tl.float8e4nv, INTERPRETED)
    tl.store(stored_ptr + token * K + channels_CB, stored_CB, mask=in_CB)
    scale_ptrs = scale_ptr + columns_C.to(tl.int64) * tl.num_programs(0) + token
    tl.store(scale_ptrs, scale_C, mask=columns_C * BLOCK < K)


@triton.jit
def _quantize_tokens_kernel(
    x_ptr,
    stored_ptr,
    scale_ptr,
    static_scale_ptr,
    stride_T,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels_K = tl.arange(0, WIDTH)
    x_K = tl.load(x_ptr + token * stride_T + channels_K, mask=channels_K < K, other=0.0).to(tl.float32)
    if static_scale_ptr is None:
        scale, inverse = scales_of(tl.max(tl.abs(x_K), axis=0), POWER_OF_TWO)
    else:
        scale = tl.load(static_scale_ptr)
        inverse = tl.div_rn(1.0, scale)
    tl.store(
        stored_ptr + token * K + channels_K, to_fp8(x_K * inverse, tl.float8e4nv, INTERPRETED), mask=channels_K < K
    )
    tl.store(scale_ptr + token, scale)
