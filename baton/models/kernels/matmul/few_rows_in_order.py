"""Batch-invariant products of few rows, which read the weight as fast as plain ones.

Each number is one sum over K in order, of the same instruction as in `matmul`: Hopper's, which adds 16 products at a
time and gives the same bits with rows and weights on either axis, in tiles of any width. As K is never split, only
narrow tiles keep every multiprocessor reading. A product's rows come in 64s; so where a weight has rows enough to fill
the GPU in tiles of 64, these are the product's rows, else they are its columns, and x fills its rows with zeros.

Legend: M rows, N columns, K the summed axis.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.models.kernels.matmul.decode_matmul import DecodeTile, multiply, prefetch_weights
from baton.tritonlib.launch import await_predecessors, bound, interpreted, overlap, start_dependents
from baton.tritonlib.rounding import round_to

MAX_ROWS = 32
_INSTRUCTION_ROWS = 64


class NarrowTile(NamedTuple):
    """The columns of the result that a program computes. It reads `depth` channels at a time, and `num_stages`
    reads are in flight."""

    columns: int
    depth: int
    num_stages: int
    prefetched: int


@cache
def adds_alike(device: torch.device) -> bool:
    """Whether tiles of any shape, and with rows and weights on either axis, have the same bits: on Hopper."""
    return device.type == "cuda" and not interpreted() and torch.cuda.get_device_capability(device) == (9, 0)


def choose(num_rows: int, num_columns: int, *, num_sms: int) -> DecodeTile | NarrowTile:
    if triton.cdiv(num_columns, 64) > num_sms:
        return DecodeTile(16 if num_rows <= 16 else 32, 64, 128, num_warps=4, num_stages=4)
    columns = 16 if num_columns <= 16 * num_sms else 32
    return NarrowTile(columns, 128, num_stages=6, prefetched=4)


def multiply_few_rows(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_MN: Tensor, tile: DecodeTile | NarrowTile
) -> None:
    if isinstance(tile, DecodeTile):
        multiply(x_MK, weight_NK, bias_N, None, tile, out_MN=out_MN)
        return
    num_rows, channels = x_MK.shape
    num_columns = weight_NK.shape[0]
    assert num_rows <= _INSTRUCTION_ROWS
    _multiply_narrow[(triton.cdiv(num_columns, tile.columns),)](
        x_MK,
        TensorDescriptor.from_tensor(weight_NK, [tile.columns, tile.depth]),
        weight_NK,
        bias_N,
        out_MN,
        num_rows,
        num_columns,
        channels,
        x_MK.stride(0),
        out_MN.stride(0),
        BLOCK_M=_INSTRUCTION_ROWS,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        PREFETCHED=tile.prefetched,
        INTERPRETED=interpreted(),
        num_warps=4,
        num_stages=tile.num_stages,
        **overlap(x_MK.device, rows=num_rows),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_narrow(
    x_ptr,
    weight_map,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    channels,
    stride_x_m,
    stride_out_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Computes some columns of all rows. Numbers past the last column or channel are read as 0."""
    first_n = tl.program_id(0) * BLOCK_N
    if OVERLAP and PREFETCHED:
        prefetch_weights(
            weight_ptr, num_columns, channels, first_n, 0, tl.cdiv(channels, BLOCK_K), BLOCK_N, BLOCK_K, PREFETCHED
        )
    start_dependents(OVERLAP)
    await_predecessors(OVERLAP)
    rows_M = tl.arange(0, BLOCK_M)
    exists_M = rows_M < num_rows
    x_M = x_ptr + rows_M.to(tl.int64) * stride_x_m
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in tl.range(0, bound(channels, INTERPRETED), BLOCK_K):
        channels_K = start_k + tl.arange(0, BLOCK_K)
        x_MK = tl.load(
            x_M[:, None] + channels_K[None, :], mask=exists_M[:, None] & (channels_K < channels)[None, :], other=0.0
        )
        weight_NK = weight_map.load([first_n, start_k])
        if INTERPRETED:
            x_MK = x_MK.to(tl.float32)
            weight_NK = weight_NK.to(tl.float32)
        acc_MN = tl.dot(x_MK, weight_NK.T, acc_MN)
    columns_N = first_n + tl.arange(0, BLOCK_N)
    exists_N = columns_N < num_columns
    if bias_ptr is not None:
        acc_MN += tl.load(bias_ptr + columns_N, mask=exists_N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + rows_M.to(tl.int64)[:, None] * stride_out_m + columns_N[None, :],
        round_to(acc_MN, out_ptr.dtype.element_ty, INTERPRETED),
        mask=exists_M[:, None] & exists_N[None, :],
    )
