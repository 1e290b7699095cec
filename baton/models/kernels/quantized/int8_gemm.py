"""Products of int8 activations with int8 weights. Sums are integers, exact in any order, so a token's bits never depend
on the batch; they are scaled once.

Legend: T token, N output channel, K input channel.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.models.kernels.matmul.split_sums import add_parts, leave_part
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, shared_bytes, start_dependents
from baton.tritonlib.rounding import round_to

_SMALLEST = tl.constexpr(1e-10)  # lower bound of the largest number that a scale is made of
_ROUNDER = tl.constexpr(12582912.0)
_ROWS, _DEPTH = 64, 128
_PROGRAMS_PER_SM = 3
_MIN_STEPS = 4
_ALIGNMENT = 16  # bytes, of what the copy engine reads


class Int8Tile(NamedTuple):
    """The part of the result that one program computes; `splits` programs share the channels of each."""

    tokens: int
    rows: int
    num_warps: int
    num_stages: int
    splits: int = 1


def choose_tile(num_tokens: int, rows: int, channels: int, *, num_sms: int, shared: int) -> Int8Tile:
    """Returns the tile for a product. The partial sums of more than 32 tokens take longer than they save, unless tiles
    leave multiprocessors idle.

    Args:
        shared: bytes of shared memory of a program at most.
    """
    tokens = next((size for size in (16, 32, 64) if num_tokens <= size), 128)
    tiles, steps = triton.cdiv(rows, _ROWS), triton.cdiv(channels, _DEPTH)
    if num_tokens > tokens:
        return Int8Tile(tokens, _ROWS, num_warps=4, num_stages=4)
    per_sm = _PROGRAMS_PER_SM if tokens <= 32 else 1
    splits = max(1, min(per_sm * num_sms // tiles, steps // _MIN_STEPS))
    has_room = 6 * (_ROWS + tokens) * _DEPTH <= shared
    stages = 6 if tokens > 32 and tiles <= num_sms and has_room else 4
    return Int8Tile(tokens, _ROWS, num_warps=4, num_stages=stages, splits=splits)


def quantize_tokens(x_TK: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (int8 [T, K], scales [T, 1] float32), by the given scale or one scale per token."""
    tokens, channels = x_TK.shape
    out_TK = torch.empty(tokens, channels, dtype=torch.int8, device=x_TK.device)
    scale_T1 = torch.empty(tokens, 1, dtype=torch.float32, device=x_TK.device)
    if tokens:
        block = triton.next_power_of_2(channels)
        _quantize_kernel[(tokens,)](
            x_TK,
            scale,
            out_TK,
            scale_T1,
            x_TK.stride(0),
            channels,
            BLOCK=block,
            **overlap(x_TK.device, rows=tokens),
            num_warps=4 if block <= 4096 else 8,
        )
    return out_TK, scale_T1


def multiply(
    x_TK: Tensor,
    x_scale_T1: Tensor,
    weight_NK: Tensor,
    scale_N: Tensor,
    bias_N: Tensor | None,
    arrived: Tensor,
    *,
    dtype: torch.dtype,
    num_sms: int,
) -> Tensor:
    """Multiplies; returns [T, N] in `dtype`.

    Args:
        arrived: int32 zeros, `num_counters` of them; left as zeros. Launches must not overlap in time.
    """
    tokens, channels = x_TK.shape
    rows = weight_NK.shape[0]
    out_TN = torch.empty(tokens, rows, dtype=dtype, device=x_TK.device)
    if not tokens:
        return out_TN
    tile = choose_tile(tokens, rows, channels, num_sms=num_sms, shared=shared_bytes(x_TK.device))
    tiles_N, tiles_T = triton.cdiv(rows, tile.rows), triton.cdiv(tokens, tile.tokens)
    partial = None
    if tile.splits > 1:
        size = (tiles_N * tile.splits, tile.rows, tile.tokens)
        partial = torch.empty(size, dtype=torch.int32, device=x_TK.device)
    x_map = weight_map = None
    if channels % _ALIGNMENT == 0:
        x_map = TensorDescriptor.from_tensor(x_TK, [tile.tokens, _DEPTH])
        weight_map = TensorDescriptor.from_tensor(weight_NK, [tile.rows, _DEPTH])
    _multiply_kernel[(tiles_N * tile.splits, tiles_T)](
        x_map,
        x_TK,
        x_scale_T1,
        weight_map,
        weight_NK,
        scale_N,
        bias_N,
        out_TN,
        partial,
        arrived,
        tokens,
        rows,
        channels,
        tile.splits,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        DEPTH=_DEPTH,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TN


def num_counters(rows: int) -> int:
    tiles: int = triton.cdiv(rows, _ROWS)
    return tiles


@triton.jit
def _quantize_kernel(
    x_ptr, given_ptr, out_ptr, scale_ptr, x_stride, channels, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Quantizes one token."""
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channels_K = tl.arange(0, BLOCK)
    in_K = channels_K < channels
    x_K = tl.load(x_ptr + token * x_stride + channels_K, mask=in_K, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x_K))) if given_ptr is None else tl.load(given_ptr)
    tl.store(out_ptr + token * channels + channels_K, to_int8(x_K, scale), mask=in_K)
    tl.store(scale_ptr + token, scale)


@triton.jit
def scale_of(largest):
    """Returns the scale that maps the largest number to int8's, 127."""
    return tl.maximum(largest, _SMALLEST) / 127.0


@triton.jit
def to_int8(x, scale):
    """Divides by the scale. Rounds to nearest, ties to even, by an addend that leaves no bits for a fraction."""
    number = tl.minimum(tl.maximum(tl.div_rn(x, scale), -128.0), 127.0)
    return ((number + _ROUNDER) - _ROUNDER).to(tl.int8)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _multiply_kernel(
    x_map,
    x_ptr,
    x_scale_ptr,
    weight_map,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_channels,
    splits,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    steps = tl.cdiv(num_channels, DEPTH)
    rows_N = tile * ROWS + tl.arange(0, ROWS)
    tokens_T = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Rows past the end read the last row and are never written.
    read_N, read_T = tl.minimum(rows_N, num_rows - 1), tl.minimum(tokens_T, num_tokens - 1)
    channels_K = tl.arange(0, DEPTH)
    x_TK = x_ptr + read_T.to(tl.int64)[:, None] * num_channels + channels_K[None, :]
    weight_NK = weight_ptr + read_N.to(tl.int64)[:, None] * num_channels + channels_K[None, :]
    sum_NT = tl.zeros([ROWS, TOKENS], tl.int32)
    first, stop = split * steps // splits, (split + 1) * steps // splits
    for step in range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        if weight_map is not None:
            # Numbers past the last row, token or channel are read as 0.
            weight = weight_map.load([tile * ROWS, step * DEPTH])
            x = x_map.load([tl.program_id(1) * TOKENS, step * DEPTH])
        else:
            in_K = channels_K[None, :] < num_channels - step * DEPTH
            weight = tl.load(weight_NK + step * DEPTH, mask=in_K, other=0)
            x = tl.load(x_TK + step * DEPTH, mask=in_K, other=0)
        sum_NT = tl.dot(weight, x.T, sum_NT, out_dtype=tl.int32)
    if partial_ptr is not None:
        places_NT = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        first_NT = partial_ptr + (places_NT + tile * splits * (ROWS * TOKENS))
        if leave_part(first_NT + split * (ROWS * TOKENS), sum_NT, None, arrived_ptr, tile) != splits - 1:
            return
        sum_NT = add_parts(first_NT, arrived_ptr, tile, splits, tl.int32, INTERPRETED)
    out = sum_NT.to(tl.float32) * (tl.load(scale_ptr + read_N)[:, None] * tl.load(x_scale_ptr + read_T)[None, :])
    if bias_ptr is not None:
        out += tl.load(bias_ptr + read_N).to(tl.float32)[:, None]
    out_NT = out_ptr + tokens_T.to(tl.int64)[None, :] * num_rows + rows_N[:, None]
    in_NT = (tokens_T < num_tokens)[None, :] & (rows_N < num_rows)[:, None]
    tl.store(out_NT, round_to(out, out_ptr.dtype.element_ty, INTERPRETED), mask=in_NT)
