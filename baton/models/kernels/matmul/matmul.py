"""Batch-invariant products: a row's result has the same bits for any other rows and any number of rows.

On a GPU each number of the result is one sum over K in one float32 accumulator, in order. The tensor cores' instruction
adds 16 products at a time (an fma of float32: one), and the choice of these products does not depend on a tile's rows
and columns. So the tile may depend on the number of rows, for fast reading at 1 row and fast arithmetic at 8192. All
tiles must use one instruction: 64 rows of a warpgroup on Hopper, also for 1 row, and K is never split.
`tests/gpu/test_batch_invariant.py` checks every tile on the hardware. `row_blocks` does the same on a CPU.

Legend: M rows, N columns, K the summed axis, H heads.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.kernels.mla.head_products import MAX_TOKENS, HeadTile, copyable, multiply_heads
from baton.models.kernels.matmul import few_rows_in_order
from baton.models.kernels.matmul.few_rows_in_order import adds_alike
from baton.models.kernels.matmul.row_blocks import multiply_in_blocks
from baton.tritonlib.launch import bound, interpreted

# Consecutive tiles have the same columns for this many tiles of rows, so weights stay in the L2 cache.
_GROUP_M = 16


@dataclass(frozen=True)
class MatmulTile:
    """The part of the result that one program computes.

    Attributes:
        depth: of K, read at a time; `num_stages` such reads are in flight.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


# NOTE: each warpgroup of 4 warps has a multiple of 64 rows: with fewer rows the compiler takes another instruction,
# whose sums may round differently.
_NARROW = MatmulTile(64, 64, 128, num_warps=4, num_stages=6)
_HIGH = MatmulTile(128, 64, 128, num_warps=8, num_stages=4)
_WIDE = MatmulTile(64, 128, 64, num_warps=4, num_stages=4)
_DEEP = MatmulTile(128, 128, 64, num_warps=8, num_stages=5)
_SQUARE = MatmulTile(128, 128, 64, num_warps=8, num_stages=4)
TILES = (_NARROW, _HIGH, _WIDE, _DEEP, _SQUARE)
# The copy engine is slow to fill rows past the last one: on an H200, 4096 columns of 14336 channels take 65 us for 1
# row, 43 us for 32 and 34 us for 64 (bench/results/batch_invariant.md). Up to `_PADDED_ROWS` rows are copied to tiles
# of `_WHOLE_ROWS` first.
_PADDED_ROWS, _WHOLE_ROWS = 256, 64
# From this many rows on, arithmetic takes most of the time for any number of columns.
_MANY_ROWS = 1024
# For few rows of heads; fewer outputs would take another instruction.
_HEAD_TILE = HeadTile(64, num_warps=4)
# For any strides and dtypes. Products of float32 are unrolled into registers, which spill unless tiles are small.
_STRIDED = MatmulTile(64, 64, 64, num_warps=4, num_stages=3)
_STRIDED_FLOAT32 = MatmulTile(32, 32, 32, num_warps=4, num_stages=2)


def multiply_invariant(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + bias`, [..., N], in one dtype. On a GPU, sums include the bias in float32 and are rounded
    once."""
    x_MK = x.reshape(-1, x.shape[-1])
    out_MN = x.new_empty(x_MK.shape[0], weight_NK.shape[0])
    if x_MK.shape[0]:
        if x.is_cuda:
            multiply_in_tiles(x_MK, weight_NK, bias_N, out_MN)
        else:
            multiply_in_blocks(x_MK.unsqueeze(0), weight_NK.t().unsqueeze(0), out_MN.unsqueeze(0))
            if bias_N is not None:
                out_MN += bias_N
    return out_MN.view(*x.shape[:-1], weight_NK.shape[0])


def multiply_heads_invariant(x_HMK: Tensor, weight_HKN: Tensor, out_HMN: Tensor) -> None:
    """Writes each head's `x @ weight` to `out`, at any strides; a row's result does not depend on other rows."""
    if x_HMK.shape[1] == 0:
        return
    if x_HMK.is_cuda:
        if x_HMK.shape[1] <= MAX_TOKENS and adds_alike(x_HMK.device) and copyable(weight_HKN):
            multiply_heads(x_HMK, weight_HKN, out_HMN, _HEAD_TILE)
            return
        multiply_strided(x_HMK, weight_HKN, None, out_HMN)
    else:
        multiply_in_blocks(x_HMK, weight_HKN, out_HMN)


@lru_cache(maxsize=4096)  # else each product of each layer costs microseconds of host time
def choose_tile(num_rows: int, num_columns: int, *, num_sms: int) -> MatmulTile:
    """Returns the fastest tile on an H200 for the products of Llama 8B at 1 to 8192 rows: the smallest tile that gives
    every multiprocessor at most one, else a tile wide enough to reread the rows only a few times."""

    def count(tile: MatmulTile) -> int:
        tiles: int = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
        return tiles

    if num_rows >= _MANY_ROWS:
        return _SQUARE
    if count(_NARROW) <= num_sms:
        return _NARROW
    if num_rows <= _WIDE.rows:
        return _WIDE
    if count(_HIGH) <= num_sms:
        return _HIGH
    return _DEEP if count(_DEEP) >= 0.8 * num_sms else _WIDE


def multiply_in_tiles(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor, tile: MatmulTile | None = None
) -> None:
    """Launches the kernel that reads whole tiles with the copy engine (TMA) where it can, else the kernel for any
    strides. The choice depends on dtype and sizes alone."""
    if not _has_tiles(weight_NK):
        weight_HKN = weight_NK.t().unsqueeze(0)
        multiply_strided(x_MK.unsqueeze(0), weight_HKN, bias_N, out_MN.unsqueeze(0))
        return
    num_rows, num_columns = out_MN.shape
    few_rows = tile is None and num_rows <= few_rows_in_order.MAX_ROWS and adds_alike(x_MK.device)
    if few_rows and weight_NK.is_contiguous() and out_MN.is_contiguous():
        if not _has_tiles(x_MK):
            x_MK = x_MK.clone(memory_format=torch.contiguous_format)
        few = few_rows_in_order.choose(num_rows, num_columns, num_sms=_num_sms(x_MK.device))
        few_rows_in_order.multiply_few_rows(x_MK, weight_NK, bias_N, out_MN, few)
        return
    if num_rows % _WHOLE_ROWS and num_rows <= _PADDED_ROWS:
        x_MK = _in_whole_tiles(x_MK)
    elif not _has_tiles(x_MK):
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    tile = tile or choose_tile(num_rows, num_columns, num_sms=_num_sms(x_MK.device))
    _multiply_tiles[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns),)](
        TensorDescriptor.from_tensor(x_MK, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        bias_N,
        out_MN,
        num_rows,
        num_columns,
        x_MK.shape[1],
        out_MN.stride(0),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP_M=_GROUP_M,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _in_whole_tiles(x_MK: Tensor) -> Tensor:
    """Returns a copy with further rows of any numbers: no result depends on other rows."""
    shape = triton.cdiv(x_MK.shape[0], _WHOLE_ROWS) * _WHOLE_ROWS, x_MK.shape[1]
    # NumPy, which interprets the kernel, warns of numbers that happen to overflow.
    padded_MK = x_MK.new_zeros(shape) if interpreted() else x_MK.new_empty(shape)
    padded_MK[: x_MK.shape[0]] = x_MK
    return padded_MK


def _has_tiles(matrix: Tensor) -> bool:
    """Whether the copy engine can read the matrix and the tensor cores support its dtype."""
    return (
        matrix.element_size() == 2
        and matrix.stride(1) == 1
        and matrix.stride(0) % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _find_tile(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the first row and column of this program's tile."""
    program = tl.program_id(0)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_of_group = GROUP_M * tl.cdiv(num_columns, BLOCK_N)
    first_m = program // tiles_of_group * GROUP_M
    width = tl.minimum(tiles_m - first_m, GROUP_M)
    in_group = program % tiles_of_group
    return (first_m + in_group % width) * BLOCK_M, in_group // width * BLOCK_N


@triton.jit
def _store_tile(
    acc_MN,
    bias_ptr,
    out_ptr,
    start_m,
    start_n,
    num_rows,
    num_columns,
    stride_out_m,
    stride_out_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows_M = start_m + tl.arange(0, BLOCK_M)
    columns_N = start_n + tl.arange(0, BLOCK_N)
    if bias_ptr is not None:
        acc_MN += tl.load(bias_ptr + columns_N, mask=columns_N < num_columns, other=0.0).to(tl.float32)[None, :]
    places_MN = rows_M.to(tl.int64)[:, None] * stride_out_m + columns_N[None, :] * stride_out_n
    mask_MN = (rows_M < num_rows)[:, None] & (columns_N < num_columns)[None, :]
    tl.store(out_ptr + places_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=mask_MN)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tiles(
    x_rows,
    weight_rows,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    stride_out_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes one tile. Numbers past the last row, column or channel are read as 0."""
    start_m, start_n = _find_tile(num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, bound(depth, INTERPRETED), BLOCK_K):
        x_MK = x_rows.load([start_m, start_k])
        weight_NK = weight_rows.load([start_n, start_k])
        if INTERPRETED:
            x_MK = x_MK.to(tl.float32)
            weight_NK = weight_NK.to(tl.float32)
        acc_MN = tl.dot(x_MK, weight_NK.T, acc_MN)
    _store_tile(acc_MN, bias_ptr, out_ptr, start_m, start_n, num_rows, num_columns, stride_out_m, 1, BLOCK_M, BLOCK_N)


def multiply_strided(x_HMK: Tensor, weight_HKN: Tensor, bias_N: Tensor | None, out_HMN: Tensor) -> None:
    """Launches the kernel for several heads, any strides and any dtype; each dtype always has the same tile."""
    num_heads, num_rows, num_columns = out_HMN.shape
    tile = _STRIDED_FLOAT32 if x_HMK.dtype == torch.float32 else _STRIDED
    _multiply_strided[(triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns), num_heads)](
        x_HMK,
        weight_HKN,
        bias_N,
        out_HMN,
        num_rows,
        num_columns,
        x_HMK.shape[2],
        *x_HMK.stride(),
        *weight_HKN.stride(),
        *out_HMN.stride(),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP_M=_GROUP_M,
        INTERPRETED=interpreted(),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_strided(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    depth,
    stride_x_h,
    stride_x_m,
    stride_x_k,
    stride_w_h,
    stride_w_k,
    stride_w_n,
    stride_out_h,
    stride_out_m,
    stride_out_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes one tile of one head."""
    head = tl.program_id(1).to(tl.int64)
    start_m, start_n = _find_tile(num_rows, num_columns, BLOCK_M, BLOCK_N, GROUP_M)
    rows_M = start_m + tl.arange(0, BLOCK_M)
    columns_N = start_n + tl.arange(0, BLOCK_N)
    x_M = x_ptr + head * stride_x_h + rows_M.to(tl.int64) * stride_x_m
    weight_N = weight_ptr + head * stride_w_h + columns_N.to(tl.int64) * stride_w_n
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, bound(depth, INTERPRETED), BLOCK_K):
        channels_K = start_k + tl.arange(0, BLOCK_K)
        exists_K = channels_K < depth
        x_MK = tl.load(
            x_M[:, None] + channels_K[None, :] * stride_x_k,
            mask=(rows_M < num_rows)[:, None] & exists_K[None, :],
            other=0.0,
        )
        weight_KN = tl.load(
            weight_N[None, :] + channels_K.to(tl.int64)[:, None] * stride_w_k,
            mask=exists_K[:, None] & (columns_N < num_columns)[None, :],
            other=0.0,
        )
        if INTERPRETED:
            x_MK = x_MK.to(tl.float32)
            weight_KN = weight_KN.to(tl.float32)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    _store_tile(
        acc_MN,
        bias_ptr,
        out_ptr + head * stride_out_h,
        start_m,
        start_n,
        num_rows,
        num_columns,
        stride_out_m,
        stride_out_n,
        BLOCK_M,
        BLOCK_N,
    )
