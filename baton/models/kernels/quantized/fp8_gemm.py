"""Products of quantized activations with fp8 weights. Tensor cores sum 128 channels; those sums are scaled and added up
in float32, because the cores keep too few bits of long sums.

For few tokens the weights are the tall side of each tile and several programs share the channels; the last one to
arrive adds up all partial sums, always in the same order. Programs do not overlap the previous kernel: they would wait
on multiprocessors that it needs (1 to 5 us more, measured). On Hopper, `few_tokens` has a kernel that gains by starting
early. The twin is `baton.models.formats.fp8.multiply`.

Legend: T tokens, N output channels, K input channels, R C rows and columns of scales.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.models.config.quantization.config import FP8_BLOCK
from baton.models.kernels.matmul.split_sums import add_parts, leave_part
from baton.tritonlib.fp8 import from_fp8
from baton.tritonlib.launch import bound, interpreted

# fp8 numbers in a load of 16 bytes.
ALIGNMENT = 16
# Programs per multiprocessor that share the work of few tokens, as many as it holds: with tiles of 64 rows, and with
# taller ones. Then the fewest channels of a program.
_PROGRAMS_PER_SM = 3
_TALL_PROGRAMS_PER_SM = 2
_CHANNELS_PER_SPLIT = 512
_MAX_SPLIT_TOKENS = 256
# Tiles of tokens that run next to each other with the same weights, so programs find both in the L2 cache.
_GROUPED_TILES = 8


class Fp8Tile(NamedTuple):
    """The part of the result that one program computes.

    Attributes:
        weights_first: the weight's rows are the tall side of the product.
    """

    tokens: int
    rows: int
    weights_first: bool
    num_warps: int
    num_stages: int


class Weight(NamedTuple):
    """An fp8 weight.

    Attributes:
        stored_NK: e4m3, contiguous; K a multiple of `ALIGNMENT`.
        scale_RC: float32, contiguous; one column, or one for every 128 channels.
        rows_per_scale: output channels that share a row of scales.
        bias: [N] or None.
        arrived: int32 zeros, `num_counters` of them. Every launch leaves zeros; launches that share them must not
            overlap.
    """

    stored_NK: Tensor
    scale_RC: Tensor
    rows_per_scale: int
    bias: Tensor | None
    arrived: Tensor


def num_counters(rows: int) -> int:
    """Returns the number of counters of a weight with `rows` output channels: one for each split tile."""
    tiles: int = _MAX_SPLIT_TOKENS // 64 * triton.cdiv(rows, 128)
    return tiles


def choose_tile(num_tokens: int, rows: int, num_sms: int, *, blocked: bool) -> Fp8Tile:
    """Returns the tile for a product. Up to 64 tokens are bound by reading the weight, so all tiles run at once; the
    tiles for more tokens were measured."""
    if num_tokens > _MAX_SPLIT_TOKENS and not blocked:
        return Fp8Tile(128, 128, weights_first=False, num_warps=8, num_stages=4)
    if num_tokens > 64:
        return Fp8Tile(64, 128, weights_first=False, num_warps=4, num_stages=4)
    is_tall = triton.cdiv(rows, 64) > _PROGRAMS_PER_SM * num_sms
    if num_tokens > 32:
        return Fp8Tile(64, 128 if is_tall else 64, weights_first=True, num_warps=4, num_stages=4 if is_tall else 5)
    tokens = 16 if num_tokens <= 16 else 32
    if is_tall:
        return Fp8Tile(tokens, 128, weights_first=True, num_warps=8, num_stages=5)
    return Fp8Tile(tokens, 64, weights_first=True, num_warps=4, num_stages=6)


def choose_splits(tile: Fp8Tile, num_tokens: int, rows: int, channels: int, num_sms: int) -> int:
    """Returns the number of programs that share a tile's channels."""
    if num_tokens > _MAX_SPLIT_TOKENS:
        return 1
    tiles: int = triton.cdiv(num_tokens, tile.tokens) * triton.cdiv(rows, tile.rows)
    per_sm = _PROGRAMS_PER_SM if tile.rows <= 64 else _TALL_PROGRAMS_PER_SM
    wanted = per_sm * num_sms // tiles
    return max(1, min(wanted, channels // _CHANNELS_PER_SPLIT))


def multiply(
    x_TK: Tensor,
    x_scale_TC: Tensor,
    weight: Weight,
    *,
    dtype: torch.dtype,
    batch_invariant: bool,
    tile: Fp8Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """Multiplies quantized activations by the weight; returns [T, N] in `dtype`.

    Args:
        x_TK: e4m3, contiguous.
        x_scale_TC: float32, one column or, where the weight has as many, one for every 128 channels; tokens adjacent in
            memory.
        batch_invariant: a token's bits do not depend on other tokens: the channels are never split.
        tile, splits: None: chosen by the shapes. Tests and measurements pass others.
    """
    num_tokens, channels = x_TK.shape
    rows = weight.stored_NK.shape[0]
    blocked = weight.scale_RC.shape[1] > 1
    assert num_tokens == 1 or x_scale_TC.stride(0) == 1
    out_TN = torch.empty(num_tokens, rows, dtype=dtype, device=x_TK.device)
    if num_tokens == 0:
        return out_TN
    num_sms = _num_sms(x_TK.device)
    tile = tile or choose_tile(num_tokens, rows, num_sms, blocked=blocked)
    if splits is None:
        splits = 1 if batch_invariant else choose_splits(tile, num_tokens, rows, channels, num_sms)
    tiles_T, tiles_N = triton.cdiv(num_tokens, tile.tokens), triton.cdiv(rows, tile.rows)
    partial = None
    if splits > 1:
        partial = torch.empty(
            tiles_T * tiles_N, splits, tile.rows, tile.tokens, dtype=torch.float32, device=x_TK.device
        )
    _multiply_kernel[(tiles_T * tiles_N, splits)](
        x_TK,
        x_scale_TC,
        weight.stored_NK,
        weight.scale_RC,
        weight.bias,
        out_TN,
        partial,
        weight.arrived,
        num_tokens,
        rows,
        channels,
        x_scale_TC.stride(1),
        WHOLE_BLOCKS=channels % FP8_BLOCK == 0,
        ROWS_PER_SCALE=weight.rows_per_scale,
        BLOCKED=blocked,
        SPLITS=splits > 1,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        BLOCK=FP8_BLOCK,
        GROUPED=_GROUPED_TILES,
        WEIGHTS_FIRST=tile.weights_first,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out_TN


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit(do_not_specialize=["num_tokens", "x_scale_stride_C"])
def _multiply_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_channels,
    x_scale_stride_C,
    WHOLE_BLOCKS: tl.constexpr,
    ROWS_PER_SCALE: tl.constexpr,
    BLOCKED: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    WEIGHTS_FIRST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tile, split, num_splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    num_columns = tl.cdiv(num_channels, BLOCK)
    group_tiles = GROUPED * tl.cdiv(num_rows, ROWS)
    first_T = tile // group_tiles * GROUPED
    grouped = tl.minimum(tl.cdiv(num_tokens, TOKENS) - first_T, GROUPED)
    tokens_T = (first_T + tile % group_tiles % grouped) * TOKENS + tl.arange(0, TOKENS)
    first_row = tile % group_tiles // grouped * ROWS
    rows_N = first_row + tl.arange(0, ROWS)
    # Rows past the end read the last row and are never written, so loads need no mask.
    read_T = tl.minimum(tokens_T, num_tokens - 1)
    read_N = tl.minimum(rows_N, num_rows - 1)
    channels_K = tl.arange(0, BLOCK)
    x_TK = x_ptr + read_T.to(tl.int64)[:, None] * num_channels + channels_K[None, :]
    weight_NK = weight_ptr + read_N.to(tl.int64)[:, None] * num_channels + channels_K[None, :]
    first = split * num_columns // num_splits
    stop = (split + 1) * num_columns // num_splits
    sum_XY = tl.zeros((ROWS, TOKENS) if WEIGHTS_FIRST else (TOKENS, ROWS), tl.float32)
    for column in range(bound(first, INTERPRETED), bound(stop, INTERPRETED)):
        start = column * BLOCK
        if WHOLE_BLOCKS:
            x = tl.load(x_TK + start)
            stored = tl.load(weight_NK + start)
        else:
            x = tl.load(x_TK + start, mask=channels_K[None, :] < num_channels - start, other=0.0)
            stored = tl.load(weight_NK + start, mask=channels_K[None, :] < num_channels - start, other=0.0)
        if BLOCKED:
            x_scale_T = tl.load(x_scale_ptr + column * x_scale_stride_C + read_T)
        if INTERPRETED:
            x = from_fp8(x, INTERPRETED)
            stored = from_fp8(stored, INTERPRETED)
        if WEIGHTS_FIRST:
            product_XY = tl.dot(stored, x.T)
        else:
            product_XY = tl.dot(x, stored.T)
        if not BLOCKED:
            sum_XY += product_XY
        elif ROWS_PER_SCALE % ROWS == 0:
            scale_T = x_scale_T * tl.load(scale_ptr + first_row // ROWS_PER_SCALE * num_columns + column)
            sum_XY += product_XY * (scale_T[None, :] if WEIGHTS_FIRST else scale_T[:, None])
        else:
            scale_N = tl.load(scale_ptr + read_N // ROWS_PER_SCALE * num_columns + column)
            sum_XY += product_XY * _outer(x_scale_T, scale_N, WEIGHTS_FIRST)
    if SPLITS:
        places_XY = tl.arange(0, ROWS if WEIGHTS_FIRST else TOKENS)[:, None] * (TOKENS if WEIGHTS_FIRST else ROWS)
        places_XY += tl.arange(0, TOKENS if WEIGHTS_FIRST else ROWS)[None, :]
        partial_XY = partial_ptr + tile.to(tl.int64) * num_splits * (ROWS * TOKENS) + places_XY
        if leave_part(partial_XY + split * (ROWS * TOKENS), sum_XY, None, arrived_ptr, tile) != num_splits - 1:
            return
        sum_XY = add_parts(partial_XY, arrived_ptr, tile, num_splits, tl.float32, INTERPRETED)
    if not BLOCKED:
        x_scale_T, scale_N = tl.load(x_scale_ptr + read_T), tl.load(scale_ptr + read_N // ROWS_PER_SCALE)
        sum_XY *= _outer(x_scale_T, scale_N, WEIGHTS_FIRST)
    if bias_ptr is not None:
        bias_N = tl.load(bias_ptr + read_N).to(tl.float32)
        sum_XY += bias_N[:, None] if WEIGHTS_FIRST else bias_N[None, :]
    place_T, in_T = tokens_T.to(tl.int64) * num_rows, tokens_T < num_tokens
    if WEIGHTS_FIRST:
        out_XY = out_ptr + place_T[None, :] + rows_N[:, None]
        tl.store(out_XY, sum_XY, mask=in_T[None, :] & (rows_N < num_rows)[:, None])
    else:
        out_XY = out_ptr + place_T[:, None] + rows_N[None, :]
        tl.store(out_XY, sum_XY, mask=in_T[:, None] & (rows_N < num_rows)[None, :])


@triton.jit
def _outer(token_T, row_N, WEIGHTS_FIRST: tl.constexpr):
    if WEIGHTS_FIRST:
        return row_N[:, None] * token_T[None, :]
    else:  # noqa: RET505 (the compiler reads only one of the two this way)
        return token_T[:, None] * row_N[None, :]
