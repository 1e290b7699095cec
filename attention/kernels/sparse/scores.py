"""Scores every token that a query sees, over paged index keys. The twin is `attention.sparse.index_scores`.

Legend: T queries, S keys, H heads, D channels, Q queries of a program, X heads of these queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.sparse import SparseQueries
from baton.kvcache.fp8 import is_fp8
from baton.tritonlib.fp8 import from_fp8
from baton.tritonlib.launch import bound, interpreted

_TILE = 64
# Keys of a program. With few queries, many programs share one query's keys; with many, a program keeps its queries.
_KEYS_FEW, _KEYS_MANY = 512, 2048
_MANY_QUERIES = 64
# With many queries, this many share the keys that a program reads. With one query, a key of 256 bytes is read for 16
# KFLOP, and L2 is the bound.
_QUERIES = 4


def paged_index_scores(
    q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries, rows: range, *, out_TS: Tensor
) -> None:
    """Writes the scores of the queries in `rows`, except for tokens that a query does not see.

    A score has the same bits for any number of queries.

    Args:
        weights_TH: float32.
        index_layer: [1, B, N, 1, D], of the queries' dtype or fp8.
        out_TS: [rows, S] float32, contiguous; S is at most the tokens of the block table.
    """
    num_rows, num_keys = out_TS.shape
    num_heads, channels = q_THD.shape[1:]
    is_many = num_rows >= _MANY_QUERIES
    tiles = (_KEYS_MANY if is_many else _KEYS_FEW) // _TILE
    # Queries in float32 alone fill the shared memory.
    together = _QUERIES if is_many and q_THD.dtype != torch.float32 else 1
    _index_scores[(triton.cdiv(num_rows, together), triton.cdiv(num_keys, tiles * _TILE))](
        q_THD[rows.start :],
        weights_TH[rows.start :],
        index_layer,
        queries.seq_lens_T[rows.start :],
        queries.requests_T[rows.start :],
        queries.block_table,
        out_TS,
        num_rows,
        num_keys,
        num_heads,
        index_layer.shape[2],
        *q_THD.stride()[:2],
        weights_TH.stride(0),
        *index_layer.stride()[1:3],
        queries.block_table.stride(0),
        CHANNELS=channels,
        QUERIES=together,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_D=max(16, triton.next_power_of_2(channels)),
        TILE=_TILE,
        TILES=tiles,
        FP8=is_fp8(index_layer),
        INTERPRETED=interpreted(),
        num_warps=8 if q_THD.dtype == torch.float32 else 4,
        num_stages=2 if q_THD.dtype == torch.float32 else 3,
    )


@triton.jit(do_not_specialize=["num_rows", "num_keys", "table_stride_R"])
def _index_scores(
    q,
    weights,
    keys,
    seq_lens,
    requests,
    block_table,
    out,
    num_rows,
    num_keys,
    num_heads,
    block_size,
    q_stride_T,
    q_stride_H,
    weights_stride_T,
    keys_stride_B,
    keys_stride_N,
    table_stride_R,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scores QUERIES queries over TILES * TILE keys; different requests' queries one after the other. Programs of the
    same keys are neighbours, so that they find the keys in L2."""
    first_row = tl.program_id(0) * QUERIES
    last_row = tl.minimum(first_row + QUERIES, num_rows) - 1
    if QUERIES > 1 and tl.load(requests + first_row) == tl.load(requests + last_row):
        _score_queries(
            q, weights, keys, seq_lens, requests, block_table, out, first_row, last_row, num_keys, num_heads,
            block_size, q_stride_T, q_stride_H, weights_stride_T, keys_stride_B, keys_stride_N, table_stride_R,
            CHANNELS, QUERIES, BLOCK_H, BLOCK_D, TILE, TILES, FP8, INTERPRETED,
        )  # fmt: skip
    else:
        for row in range(bound(first_row, INTERPRETED), bound(last_row + 1, INTERPRETED)):
            _score_queries(
                q, weights, keys, seq_lens, requests, block_table, out, row, row, num_keys, num_heads, block_size,
                q_stride_T, q_stride_H, weights_stride_T, keys_stride_B, keys_stride_N, table_stride_R,
                CHANNELS, 1, BLOCK_H, BLOCK_D, TILE, TILES, FP8, INTERPRETED,
            )  # fmt: skip


@triton.jit
def _score_queries(
    q,
    weights,
    keys,
    seq_lens,
    requests,
    block_table,
    out,
    first_row,
    last_row,
    num_keys,
    num_heads,
    block_size,
    q_stride_T,
    q_stride_H,
    weights_stride_T,
    keys_stride_B,
    keys_stride_N,
    table_stride_R,
    CHANNELS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Scores consecutive queries of one request. Their heads are a product's adjacent columns and keys its rows, so
    that no warp needs another's heads."""
    request = tl.load(requests + first_row).to(tl.int64)
    heads_X = tl.arange(0, QUERIES * BLOCK_H) % BLOCK_H
    head_mask = heads_X < num_heads
    channels_D = tl.arange(0, BLOCK_D)
    channel_mask = channels_D < CHANNELS
    # Rows past the last query repeat it, and its scores are written twice.
    rows_X = tl.minimum(first_row + tl.arange(0, QUERIES * BLOCK_H) // BLOCK_H, last_row).to(tl.int64)
    q_XD = tl.load(
        q + rows_X[:, None] * q_stride_T + heads_X[:, None] * q_stride_H + channels_D[None, :],
        mask=head_mask[:, None] & channel_mask[None, :],
        other=0.0,
    )
    weights_X = tl.load(weights + rows_X * weights_stride_T + heads_X, mask=head_mask, other=0.0)
    if INTERPRETED:
        q_XD = q_XD.to(tl.float32)
    rows_Q = tl.minimum(first_row + tl.arange(0, QUERIES), last_row).to(tl.int64)
    seen_Q = tl.minimum(tl.load(seq_lens + rows_Q), num_keys)
    begin = tl.program_id(1) * (TILES * TILE)
    # The last query sees the most.
    stop = tl.minimum(tl.minimum(tl.load(seq_lens + last_row), num_keys), begin + TILES * TILE)
    for first in range(bound(begin, INTERPRETED), bound(stop, INTERPRETED), TILE):
        keys_S = first + tl.arange(0, TILE)
        # Places past the last key read the last key; nothing is written there.
        read_S = tl.minimum(keys_S, stop - 1)
        blocks_S = tl.load(block_table + request * table_stride_R + read_S // block_size)
        slots_S = keys + blocks_S.to(tl.int64) * keys_stride_B + (read_S % block_size) * keys_stride_N
        k_SD = tl.load(slots_S[:, None] + channels_D[None, :], mask=channel_mask[None, :], other=0.0)
        if FP8:
            k_SD = from_fp8(k_SD, INTERPRETED)
        dots_SX = tl.dot(k_SD.to(q_XD.dtype), tl.trans(q_XD), input_precision="ieee")
        of_heads_SX = tl.maximum(dots_SX, 0.0) * weights_X[None, :]
        scores_SQ = tl.sum(of_heads_SX.reshape([TILE, QUERIES, BLOCK_H]), 2)
        tl.store(out + rows_Q[None, :] * num_keys + keys_S[:, None], scores_SQ, mask=keys_S[:, None] < seen_Q[None, :])
