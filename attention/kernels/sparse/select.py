"""The slots of each query's best tokens, in the order of their positions. The twin is `attention.sparse.best_keys`.

A threshold per query, the least of its best scores, decides which tokens are kept. Two kernels read the scores in
pieces: one counts what each piece keeps, one writes the slots to where the pieces before it end. Legend: T queries,
S keys, K selected keys, P pieces of keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.sparse.scores import paged_index_scores
from attention.sparse import SparseQueries

_TILE = 1024
_TILES = 4
# Scores in memory at once: 256 MiB.
_MAX_SCORES = 1 << 26


def select_slots(
    q_THD: Tensor,
    weights_TH: Tensor,
    index_layer: Tensor,
    queries: SparseQueries,
) -> Tensor:
    """[T, queries.width] int32; as `SparseMLABackend.select`."""
    num_queries, num_keys = len(queries.seq_lens_T), queries.max_keys
    # Zeros, because scores that are NaN select nothing, and a slot must be one of the cache.
    slots_TK = torch.zeros(num_queries, queries.width, dtype=torch.int32, device=q_THD.device)
    step = max(1, _MAX_SCORES // num_keys)
    for start in range(0, num_queries, step):
        rows = range(start, min(start + step, num_queries))
        scores_TS = torch.empty(len(rows), num_keys, dtype=torch.float32, device=q_THD.device)
        paged_index_scores(q_THD, weights_TH, index_layer, queries, rows, out_TS=scores_TS)
        _write_slots(scores_TS, queries, rows, index_layer.shape[2], slots_TK[rows.start : rows.stop])
    return slots_TK


def _write_slots(scores_TS: Tensor, queries: SparseQueries, rows: range, block_size: int, slots_TK: Tensor) -> None:
    num_rows, num_keys = scores_TS.shape
    least_T = scores_TS.topk(queries.width, dim=-1, sorted=False).values.amin(-1)
    pieces = triton.cdiv(num_keys, _TILES * _TILE)
    kept_TP2 = torch.empty(num_rows, pieces, 2, dtype=torch.int32, device=scores_TS.device)
    seq_lens_T, requests_T = queries.seq_lens_T[rows.start :], queries.requests_T[rows.start :]
    _count[(num_rows, pieces)](
        scores_TS, least_T, seq_lens_T, kept_TP2, num_keys, pieces, TILE=_TILE, TILES=_TILES, num_warps=8
    )
    _compact[(num_rows, pieces)](
        scores_TS,
        least_T,
        seq_lens_T,
        requests_T,
        queries.block_table,
        kept_TP2,
        slots_TK,
        num_keys,
        pieces,
        queries.width,
        block_size,
        queries.block_table.stride(0),
        slots_TK.stride(0),
        TILE=_TILE,
        TILES=_TILES,
        BLOCK_P=triton.next_power_of_2(pieces),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_keys", "num_pieces"])
def _count(scores, least, seq_lens, kept, num_keys, num_pieces, TILE: tl.constexpr, TILES: tl.constexpr):
    """How many scores of one piece are above the threshold, and how many equal it."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    threshold = tl.load(least + row)
    above_S = tl.zeros([TILE], tl.int32)
    equal_S = tl.zeros([TILE], tl.int32)
    for tile in range(TILES):
        start = (piece * TILES + tile) * TILE
        if start < seq_len:
            keys_S = start + tl.arange(0, TILE)
            seen_S = keys_S < seq_len
            scores_S = tl.load(scores + row * num_keys + keys_S, mask=seen_S, other=-float("inf"))
            above_S += (seen_S & (scores_S > threshold)).to(tl.int32)
            equal_S += (seen_S & (scores_S == threshold)).to(tl.int32)
    target = kept + (row * num_pieces + piece) * 2
    tl.store(target, tl.sum(above_S, 0))
    tl.store(target + 1, tl.sum(equal_S, 0))


@triton.jit(do_not_specialize=["num_keys", "num_pieces", "width", "table_stride_R"])
def _compact(
    scores,
    least,
    seq_lens,
    requests,
    block_table,
    kept,
    slots,
    num_keys,
    num_pieces,
    width,
    block_size,
    table_stride_R,
    slots_stride_T,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Writes the slots of one piece's kept tokens: all above the threshold, and of the equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    if piece * TILES * TILE < seq_len:
        threshold = tl.load(least + row)
        request = tl.load(requests + row).to(tl.int64)
        pieces_P = tl.arange(0, BLOCK_P)
        counts = kept + (row * num_pieces + pieces_P) * 2
        above_P = tl.load(counts, mask=pieces_P < num_pieces, other=0)
        equal_P = tl.load(counts + 1, mask=pieces_P < num_pieces, other=0)
        room = width - tl.sum(above_P, 0)
        above = tl.sum(tl.where(pieces_P < piece, above_P, 0), 0)
        equal = tl.sum(tl.where(pieces_P < piece, equal_P, 0), 0)
        for tile in range(TILES):
            start = (piece * TILES + tile) * TILE
            keys_S = start + tl.arange(0, TILE)
            seen_S = keys_S < seq_len
            scores_S = tl.load(scores + row * num_keys + keys_S, mask=seen_S, other=-float("inf"))
            above_S = (seen_S & (scores_S > threshold)).to(tl.int32)
            equal_S = (seen_S & (scores_S == threshold)).to(tl.int32)
            above_before_S = above + tl.cumsum(above_S, 0) - above_S
            equal_before_S = equal + tl.cumsum(equal_S, 0) - equal_S
            kept_S = (above_S > 0) | ((equal_S > 0) & (equal_before_S < room))
            places_S = above_before_S + tl.minimum(equal_before_S, room)
            blocks_S = tl.load(block_table + request * table_stride_R + keys_S // block_size, mask=kept_S, other=0)
            tl.store(
                slots + row * slots_stride_T + places_S,
                blocks_S * block_size + keys_S % block_size,
                mask=kept_S & (places_S < width),
            )
            above += tl.sum(above_S, 0)
            equal += tl.sum(equal_S, 0)
