"""The rows of a warpgroup of the Hopper kernels of attention over a batch: its queries' way into shared memory, and its
results' way out.

The legend is that of `attention.kernels.paged.portable`, with A and P for the two parts of the key channels, and C for
rows as they are copied.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared

from attention.kernels.paged.split import WRITTEN

# Rows of a warpgroup.
ROWS = gl.constexpr(64)
COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


class Split(NamedTuple):
    """A program's part of its tile's keys, as in `attention.kernels.paged.split`; the pointers are None where keys are
    not split. `alone`: it has all of them."""

    out_ptr: gl.tensor | None
    lse_ptr: gl.tensor | None
    index: gl.tensor
    alone: gl.tensor
    num_tokens: gl.tensor
    num_heads: gl.tensor


class Queries(NamedTuple):
    """A warpgroup's rows of a tile. `valid_M`: the row is a query."""

    tokens_M: gl.tensor
    heads_M: gl.tensor
    valid_M: gl.tensor


@gluon.jit
def queries_of(WARPGROUP: gl.constexpr, tile, sizes: gl.constexpr):
    PACK: gl.constexpr = sizes.pack
    BLOCK_N: gl.constexpr = sizes.block_n
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows_M = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma_N))
    tokens_M = tile.first_token + rows_M // PACK
    heads_M = tile.head + rows_M % PACK
    return Queries(tokens_M, heads_M, _are_queries(rows_M, tokens_M, tile, PACK))


@gluon.jit
def load_queries(WARPGROUP: gl.constexpr, q, q_A, q_P, tile, sizes: gl.constexpr):
    rows_C, valid_C = _query_rows(WARPGROUP, q, tile, sizes)
    _load_queries(rows_C, q_A, q_P, valid_C, COPIES, sizes.key_size, sizes.block_p)


@gluon.jit
def copy_queries(WARPGROUP: gl.constexpr, q, q_A, q_P, tile, sizes: gl.constexpr):
    """Starts to copy the queries; `await_queries` waits for them. Addresses and strides are multiples of 16 bytes."""
    rows_C, valid_C = _query_rows(WARPGROUP, q, tile, sizes)
    BLOCK_A: gl.constexpr = sizes.block_a
    BLOCK_P: gl.constexpr = sizes.block_p
    channels = gl.arange(0, BLOCK_A, layout=gl.SliceLayout(0, COPIES))
    mask = valid_C[:, None] & (channels < sizes.key_size)[None, :]
    async_copy.async_copy_global_to_shared(q_A, rows_C[:, None] + channels[None, :], mask=mask)
    if BLOCK_P:
        channels_P = BLOCK_A + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, COPIES))
        mask_P = valid_C[:, None] & (channels_P < sizes.key_size)[None, :]
        async_copy.async_copy_global_to_shared(q_P, rows_C[:, None] + channels_P[None, :], mask=mask_P)
    async_copy.commit_group()


@gluon.jit
def await_queries():
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def write(WARPGROUP: gl.constexpr, out, split, lse, acc_MV, max_M, sum_M, q_A, queries, tile, sizes: gl.constexpr):
    """Writes the rows' results, and their log-sum-exps if wanted; the queries in `q_A` are no longer needed."""
    PACK: gl.constexpr = sizes.pack
    SPLIT: gl.constexpr = split.out_ptr is not None
    per_row_V: gl.constexpr = gl.SliceLayout(1, acc_MV.type.layout)
    query_start, head = tile.query_start, tile.head
    tokens_M, heads_M, valid_M = queries.tokens_M, queries.heads_M, queries.valid_M
    # For a query that saw no key the output is 0, and the log-sum-exp is `max_M`, which is -inf.
    total_M = gl.where(sum_M == 0.0, 1.0, sum_M)
    acc_MV *= gl.convert_layout(1.0 / total_M, per_row_V)[:, None]
    lse_M = (max_M + gl.log2(total_M)) / 1.4426950408889634
    alone = True
    if SPLIT:
        alone = split.alone
        lse_rows_M = (split.index * split.num_heads + heads_M) * split.num_tokens + query_start + tokens_M
        gl.store(split.lse_ptr + lse_rows_M, gl.where(alone, WRITTEN, lse_M), mask=valid_M)
        split_rows_M = (
            split.index.to(gl.int64) * split.num_tokens + query_start + tokens_M
        ) * split.num_heads + heads_M
        partial_M = gl.convert_layout(valid_M & (not alone), per_row_V)
        split_rows_V = gl.convert_layout(split_rows_M * sizes.value_size, per_row_V)
        _store(split.out_ptr, split_rows_V, acc_MV, partial_M, sizes.value_size)
        valid_M = valid_M & alone
    out_ptr = out.ptr + query_start.to(gl.int64) * out.stride_t + head * out.stride_h
    if sizes.block_v == sizes.block_a:
        # The result passes through the queries' memory, for stores of 16 bytes.
        q_A.store(acc_MV.to(q_A.dtype))
        rows_C = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIES))
        tokens_C = tile.first_token + rows_C // PACK
        valid_C = _are_queries(rows_C, tokens_C, tile, PACK) & alone
        out_rows_C = tokens_C.to(gl.int64) * out.stride_t + rows_C % PACK * out.stride_h
        _store(out_ptr, out_rows_C, q_A.load(COPIES), valid_C, sizes.value_size)
    else:
        out_rows_M = tokens_M.to(gl.int64) * out.stride_t + (heads_M - head) * out.stride_h
        out_rows_V = gl.convert_layout(out_rows_M, per_row_V)
        _store(out_ptr, out_rows_V, acc_MV, gl.convert_layout(valid_M, per_row_V), sizes.value_size)
    if lse.ptr is not None:
        lse_rows_M = heads_M.to(gl.int64) * lse.stride_h + (query_start + tokens_M) * lse.stride_t
        gl.store(lse.ptr + lse_rows_M, lse_M, mask=valid_M)


@gluon.jit
def _query_rows(WARPGROUP: gl.constexpr, q, tile, sizes: gl.constexpr):
    """Returns pointers to the rows of the queries, and which rows are queries."""
    rows_C = WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPIES))
    tokens_C = tile.first_token + rows_C // sizes.pack
    valid_C = _are_queries(rows_C, tokens_C, tile, sizes.pack)
    heads_C = tile.head + rows_C % sizes.pack
    return q.ptr + (tile.query_start + tokens_C).to(gl.int64) * q.stride_t + heads_C * q.stride_h, valid_C


@gluon.jit
def _are_queries(rows, tokens, tile, PACK: gl.constexpr):
    USED: gl.constexpr = 2 * ROWS // PACK * PACK
    return (tokens < tile.query_len) & (rows < USED) & (rows % PACK < tile.heads_left)


@gluon.jit
def _load_queries(q_rows, q_A, q_P, valid, layout: gl.constexpr, KEY_SIZE: gl.constexpr, BLOCK_P: gl.constexpr):
    BLOCK_A: gl.constexpr = q_A.shape[1]
    channels = gl.arange(0, BLOCK_A, layout=gl.SliceLayout(0, layout))
    mask = valid[:, None] & (channels < KEY_SIZE)[None, :]
    q_A.store(gl.load(q_rows[:, None] + channels[None, :], mask=mask, other=0.0))
    if BLOCK_P:
        channels_P = BLOCK_A + gl.arange(0, BLOCK_P, layout=gl.SliceLayout(0, layout))
        mask_P = valid[:, None] & (channels_P < KEY_SIZE)[None, :]
        q_P.store(gl.load(q_rows[:, None] + channels_P[None, :], mask=mask_P, other=0.0))
    fence_async_shared()


@gluon.jit
def _store(pointer, rows, acc, valid, VALUE_SIZE: gl.constexpr):
    channels = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    mask = valid[:, None] & (channels < VALUE_SIZE)[None, :]
    gl.store(pointer + rows[:, None] + channels[None, :], acc.to(pointer.dtype.element_ty), mask=mask)
