"""Index scores of every token that a query sees, over paged index keys. The twin is `attention.sparse.index_scores`.

Legend: T queries, S keys, H heads, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.sparse import SparseQueries
from kvcache.fp8 import is_fp8
from tritonlib.fp8 import from_fp8
from tritonlib.launch import interpreted

_TILE = 64
# Keys of a program: with few queries, many programs share one query's keys; with many, a program keeps its query.
_KEYS_FEW, _KEYS_MANY = 512, 2048
_MANY_QUERIES = 64


def paged_index_scores(
    q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries, rows: range, *, out_TS: Tensor
) -> None:
    """Writes the scores of the queries in `rows`; none for tokens that a query does not see.

    A score has the same bits for any number of queries.

    Args:
        weights_TH: float32.
        index_layer: [1, B, N, 1, D], of the queries' dtype or fp8.
        out_TS: [rows, S] float32, contiguous; S is at most the tokens of the block table.
    """
    num_rows, num_keys = out_TS.shape
    num_heads, channels = q_THD.shape[1:]
    tiles = (_KEYS_FEW if num_rows < _MANY_QUERIES else _KEYS_MANY) // _TILE
    _index_scores[(num_rows, triton.cdiv(num_keys, tiles * _TILE))](
        q_THD[rows.start :],
        weights_TH[rows.start :],
        index_layer,
        queries.seq_lens_T[rows.start :],
        queries.requests_T[rows.start :],
        queries.block_table,
        out_TS,
        num_keys,
        num_heads,
        index_layer.shape[2],
        *q_THD.stride()[:2],
        weights_TH.stride(0),
        *index_layer.stride()[1:3],
        queries.block_table.stride(0),
        CHANNELS=channels,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_D=max(16, triton.next_power_of_2(channels)),
        TILE=_TILE,
        TILES=tiles,
        FP8=is_fp8(index_layer),
        INTERPRETED=interpreted(),
        num_warps=8 if q_THD.dtype == torch.float32 else 4,
        num_stages=2,
    )


@triton.jit(do_not_specialize=["num_keys", "table_stride_R"])
def _index_scores(
    q,
    weights,
    keys,
    seq_lens,
    requests,
    block_table,
    out,
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
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One query and TILES * TILE keys. Programs of the same keys are neighbours, so that they find these in L2."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (TILES * TILE)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    request = tl.load(requests + row).to(tl.int64)
    heads_H = tl.arange(0, BLOCK_H)
    channels_D = tl.arange(0, BLOCK_D)
    head_mask = heads_H < num_heads
    channel_mask = channels_D < CHANNELS
    q_HD = tl.load(
        q + row * q_stride_T + heads_H[:, None] * q_stride_H + channels_D[None, :],
        mask=head_mask[:, None] & channel_mask[None, :],
        other=0.0,
    )
    weights_H = tl.load(weights + row * weights_stride_T + heads_H, mask=head_mask, other=0.0)
    if INTERPRETED:
        q_HD = q_HD.to(tl.float32)
    for tile in range(TILES):
        keys_S = first + tile * TILE + tl.arange(0, TILE)
        seen_S = keys_S < seq_len
        if first + tile * TILE < seq_len:
            blocks_S = tl.load(block_table + request * table_stride_R + keys_S // block_size, mask=seen_S, other=0)
            rows_S = keys + blocks_S.to(tl.int64) * keys_stride_B + (keys_S % block_size) * keys_stride_N
            k_SD = tl.load(
                rows_S[:, None] + channels_D[None, :], mask=seen_S[:, None] & channel_mask[None, :], other=0.0
            )
            if FP8:
                k_SD = from_fp8(k_SD, INTERPRETED)
            k_SD = k_SD.to(q_HD.dtype)
            dots_HS = tl.dot(q_HD, tl.trans(k_SD), input_precision="ieee")
            scores_S = tl.sum(tl.maximum(dots_HS, 0.0) * weights_H[:, None], 0)
            tl.store(out + row * num_keys + keys_S, scores_S, mask=seen_S)
