"""Products of few tokens with weights of 8 bits, fp8 or int8, on Hopper, bound by reading the weight.

A program starts while the previous kernel runs, fills its shared memory with its first weights and only then waits for
its input. Tensor cores sum 128 channels; those sums, of fp8, are scaled and added up in float32. Programs that share a
tile add up their sums in a fixed order.

Legend: T tokens, N output channels, K input channels, C columns of scales.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.formats import fp8
from baton.models.kernels.quantized.fp8_gemm import Weight, num_counters
from baton.tritonlib.hopper_check import HopperKernels, Pair, probe_of
from baton.tritonlib.launch import overlap

HOPPER = HopperKernels("products of few tokens with weights of 8 bits", probe_of(__name__))
MAX_TOKENS = 64
_TILE_ROWS = 64
# Programs of 17 to 32 tokens that share more channels than this are no faster than `fp8_gemm`'s.
_MOST_CHANNELS = 8192


class DecodeTile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        tokens: of the result; at least the batch's number.
        columns: blocks of 128 channels in a step, 1, 2 or 4; `num_stages` steps are in flight.
        splits: number of programs that share each tile, at most one per step.
    """

    tokens: int
    rows: int
    columns: int
    num_stages: int
    splits: int = 1


def choose(num_tokens: int, weight: Weight, num_sms: int) -> DecodeTile | None:
    """Returns the tile for a product; None where another kernel is as fast. The sizes were measured with the layers of
    Llama-3.1-8B."""
    if not 0 < num_tokens <= MAX_TOKENS:
        return None
    rows, channels = weight.stored_NK.shape
    tokens = next(size for size in (16, 32, 64) if num_tokens <= size)
    tiles = triton.cdiv(rows, _TILE_ROWS)
    tile = _of_many_rows(tokens, tiles, num_sms) if tiles > num_sms else _of_few_rows(tokens, tiles, channels, num_sms)
    if tile is None or (weight.scale_RC.shape[1] > 1 and weight.rows_per_scale % tile.rows):
        return None
    return tile


def _of_many_rows(tokens: int, tiles: int, num_sms: int) -> DecodeTile | None:
    """Returns tiles so small that two or four programs share a multiprocessor; large ones where there are few tiles."""
    if tiles <= 2 * num_sms:
        return DecodeTile(tokens, 2 * _TILE_ROWS, 2, 5) if tokens <= 32 else None
    if tokens == 16:
        return DecodeTile(tokens, 2 * _TILE_ROWS, 2, 3)
    return DecodeTile(tokens, _TILE_ROWS, 2, 2) if tokens == 32 else DecodeTile(tokens, _TILE_ROWS, 1, 3)


def _of_few_rows(tokens: int, tiles: int, channels: int, num_sms: int) -> DecodeTile | None:
    """Returns tiles for one program per multiprocessor, which has up to 200 KiB in flight; programs share tiles where
    there are fewer tiles. The partial sums of more tokens cost more, so fewer programs share one."""
    most, step = num_sms // tiles, 4 * FP8_BLOCK
    if tokens == 64:
        return DecodeTile(tokens, _TILE_ROWS, 2, 5, splits=most) if most > 1 else None
    if tokens == 32:
        if most > 1 and channels > _MOST_CHANNELS:
            return None
        return DecodeTile(tokens, _TILE_ROWS, 4, 4, splits=max(1, most // 2))
    if most == 1:
        return DecodeTile(tokens, _TILE_ROWS, 4, 5)
    if channels <= most * 4 * step:
        return DecodeTile(tokens, _TILE_ROWS, 4, 4, splits=most)
    # A program would refill its memory, so two of them take turns.
    return DecodeTile(tokens, _TILE_ROWS, 4, 2, splits=2 * most)


def multiply(x_TK: Tensor, x_scale_TC: Tensor, weight: Weight, *, dtype: torch.dtype, tile: DecodeTile) -> Tensor:
    """Multiplies quantized activations by the weight; returns [T, N] in `dtype`. It takes what `fp8_gemm.multiply`
    takes."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from baton.models.kernels.quantized.few_tokens_hopper import multiply_few_tokens

    is_int8 = x_TK.dtype == torch.int8

    def described(matrix_RK: Tensor, rows: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([rows, FP8_BLOCK], gl.int8 if is_int8 else gl.float8e4nv)
        return TensorDescriptor.from_tensor(matrix_RK, [rows, FP8_BLOCK], layout)

    num_tokens, channels = x_TK.shape
    rows = weight.stored_NK.shape[0]
    blocked = weight.scale_RC.shape[1] > 1
    assert 0 < num_tokens <= tile.tokens
    assert not blocked or weight.rows_per_scale % tile.rows == 0
    tiles = triton.cdiv(rows, tile.rows)
    splits = min(tile.splits, triton.cdiv(channels, tile.columns * FP8_BLOCK))
    out_TN = torch.empty(num_tokens, rows, dtype=dtype, device=x_TK.device)
    partial = None
    if splits > 1:
        partial = torch.empty(
            tiles * splits, tile.rows, tile.tokens, dtype=torch.int32 if is_int8 else torch.float32, device=x_TK.device
        )
    multiply_few_tokens[(tiles * splits,)](
        described(x_TK, tile.tokens),
        x_scale_TC,
        described(weight.stored_NK, tile.rows),
        weight.scale_RC,
        weight.bias,
        out_TN,
        partial,
        weight.arrived,
        num_tokens,
        rows,
        channels,
        splits,
        x_scale_TC.stride(1),
        BLOCKED=blocked,
        ROWS_PER_SCALE=weight.rows_per_scale,
        ROWS=tile.rows,
        TOKENS=tile.tokens,
        BLOCK=FP8_BLOCK,
        COLUMNS=tile.columns,
        STAGES=tile.num_stages,
        num_warps=4,
        **overlap(x_TK.device, rows=num_tokens),
    )
    return out_TN


def compare_on_hopper(device: torch.device) -> Iterator[Pair]:
    return compare(device, multiply)


def compare(device: torch.device, product: Callable[..., Tensor]) -> Iterator[Pair]:
    """Results of a product that has the arguments of `multiply`, and what they should be."""
    numbers = torch.Generator(device).manual_seed(0)
    rows, channels, tokens = 136, 1104, 11  # no tile divides them
    blocks = (triton.cdiv(rows, FP8_BLOCK), triton.cdiv(channels, FP8_BLOCK))
    for dtype, rows_per_scale, scales, tile in (
        (fp8.E4M3, FP8_BLOCK, blocks, DecodeTile(16, 64, 4, 2, 2)),
        (fp8.E4M3, 1, (rows, 1), DecodeTile(32, 128, 2, 2)),
        (torch.int8, 1, (rows, 1), DecodeTile(16, 64, 1, 3, 2)),
    ):
        stored_NK = (torch.randn(rows, channels, device=device, generator=numbers) * 30).to(dtype)
        x_TK = (torch.randn(tokens, channels, device=device, generator=numbers) * 30).to(dtype)
        scale_RC = torch.rand(scales, device=device, generator=numbers) + 0.5
        scale_TC = (torch.rand(scales[1], tokens, device=device, generator=numbers) + 0.5).T
        bias_N = torch.randn(rows, device=device, generator=numbers) * channels
        arrived = torch.zeros(num_counters(rows), dtype=torch.int32, device=device)
        weight = Weight(stored_NK, scale_RC, rows_per_scale, bias_N, arrived)
        expected_TN = fp8.multiply(x_TK, scale_TC, stored_NK, scale_RC, rows_per_scale=rows_per_scale) + bias_N
        for _ in range(2):  # programs that share a tile count themselves from 0 again
            yield product(x_TK, scale_TC, weight, dtype=torch.float32, tile=tile), expected_TN
