"""Selects the slots of each query's best tokens, in the order of their positions. The twin is
`attention.sparse.best_keys`.

A threshold per query, the smallest of its best scores, decides which tokens are kept; among scores that equal it, the
first are kept. It is a radix search: each pass counts the scores by their next eight bits. Programs share a query's
scores in pieces. Programs past a query's last token end at once, so the cost follows the actual lengths. Legend: T
queries, S keys, K selected keys, P pieces of keys, D values of eight bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.sparse.scores import paged_index_scores
from attention.sparse import SparseQueries

_TILE = 1024
_TILES = 4
# Number of scores in memory at once, 256 MiB.
_MAX_SCORES = 1 << 26
_PASSES = 4
_DIGITS = tl.constexpr(256)
_SIGN = tl.constexpr(-(2**31))


def select_slots(q_THD: Tensor, weights_TH: Tensor, index_layer: Tensor, queries: SparseQueries) -> Tensor:
    """Implements `SparseMLABackend.select`; returns [T, queries.width] int32."""
    num_queries, num_keys = len(queries.seq_lens_T), queries.max_keys
    # Zeros, because NaN scores select nothing, and every slot must exist in the cache.
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
    pieces = triton.cdiv(num_keys, _TILES * _TILE)
    grid, device = (num_rows, pieces), scores_TS.device
    digits = torch.zeros(_PASSES, num_rows, _DIGITS.value, dtype=torch.int32, device=device)
    kept_TP2 = torch.empty(num_rows, pieces, 2, dtype=torch.int32, device=device)
    least_T = torch.empty(num_rows, dtype=torch.float32, device=device)
    seq_lens_T, requests_T = queries.seq_lens_T[rows.start :], queries.requests_T[rows.start :]
    for number in range(_PASSES):
        _count_digits[grid](
            scores_TS, seq_lens_T, digits, num_rows, num_keys, queries.width,
            PASS=number, TILE=_TILE, TILES=_TILES, num_warps=8,
        )  # fmt: skip
    _count_kept[grid](
        scores_TS, seq_lens_T, digits, least_T, kept_TP2, num_rows, num_keys, pieces, queries.width,
        PASSES=_PASSES, TILE=_TILE, TILES=_TILES, num_warps=8,
    )  # fmt: skip
    _compact[grid](
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


@triton.jit
def _found_digits(digits, row, num_rows, rank, PASSES: tl.constexpr):
    """Returns the leading bits, as far as counted, of the score that has this rank."""
    digits_D = tl.arange(0, _DIGITS)
    found = tl.zeros([], tl.int32)
    for number in tl.static_range(PASSES):
        counts_D = tl.load(digits + (number * num_rows + row) * _DIGITS + digits_D)
        at_least_D = tl.sum(counts_D, 0) - tl.cumsum(counts_D, 0) + counts_D
        digit = tl.sum((at_least_D >= rank).to(tl.int32), 0) - 1
        rank -= tl.sum(tl.where(digits_D > digit, counts_D, 0), 0)
        found = (found << 8) | digit
    return found


@triton.jit(do_not_specialize=["num_rows", "num_keys", "width"])
def _count_digits(
    scores,
    seq_lens,
    digits,
    num_rows,
    num_keys,
    width,
    PASS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Counts, by their next eight bits, the scores of one piece that share the threshold's leading bits."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (TILES * TILE)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    if first < seq_len:
        begin = _found_digits(digits, row, num_rows, tl.minimum(seq_len, width), PASS)
        counts_D = tl.zeros([_DIGITS], tl.int32)
        for tile in range(TILES):
            keys_S = first + tile * TILE + tl.arange(0, TILE)
            counted_S = keys_S < seq_len
            scores_S = tl.load(scores + row * num_keys + keys_S, mask=counted_S, other=0.0)
            # As unsigned integers these bits sort like the scores.
            bits_S = scores_S.to(tl.int32, bitcast=True)
            bits_S = tl.where(bits_S < 0, ~bits_S, bits_S ^ _SIGN)
            if PASS > 0:
                counted_S = counted_S & (((bits_S >> (32 - 8 * PASS)) & ((1 << (8 * PASS)) - 1)) == begin)
            counts_D += tl.histogram((bits_S >> (24 - 8 * PASS)) & 255, _DIGITS, mask=counted_S)
        target_D = digits + (PASS * num_rows + row) * _DIGITS + tl.arange(0, _DIGITS)
        tl.atomic_add(target_D, counts_D, mask=counts_D > 0)


@triton.jit(do_not_specialize=["num_rows", "num_keys", "num_pieces", "width"])
def _count_kept(
    scores,
    seq_lens,
    digits,
    least,
    kept,
    num_rows,
    num_keys,
    num_pieces,
    width,
    PASSES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Counts the scores of one piece above the threshold and equal to it, and writes the threshold."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    if piece * (TILES * TILE) < seq_len:
        bits = _found_digits(digits, row, num_rows, tl.minimum(seq_len, width), PASSES)
        threshold = tl.where(bits < 0, bits ^ _SIGN, ~bits).to(tl.float32, bitcast=True)
        above_S = tl.zeros([TILE], tl.int32)
        equal_S = tl.zeros([TILE], tl.int32)
        for tile in range(TILES):
            keys_S = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
            seen_S = keys_S < seq_len
            scores_S = tl.load(scores + row * num_keys + keys_S, mask=seen_S, other=0.0)
            above_S += (seen_S & (scores_S > threshold)).to(tl.int32)
            equal_S += (seen_S & (scores_S == threshold)).to(tl.int32)
        target = kept + (row * num_pieces + piece) * 2
        tl.store(target, tl.sum(above_S, 0))
        tl.store(target + 1, tl.sum(equal_S, 0))
        if piece == 0:
            tl.store(least + row, threshold)


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
    """Writes the slots of one piece's kept tokens: all above the threshold, and the first of the equal ones."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    seq_len = tl.minimum(tl.load(seq_lens + row), num_keys)
    if piece * (TILES * TILE) < seq_len:
        threshold = tl.load(least + row)
        request = tl.load(requests + row).to(tl.int64)
        pieces_P = tl.arange(0, BLOCK_P)
        counted_P = (pieces_P < num_pieces) & (pieces_P * (TILES * TILE) < seq_len)
        counts = kept + (row * num_pieces + pieces_P) * 2
        above_P = tl.load(counts, mask=counted_P, other=0)
        equal_P = tl.load(counts + 1, mask=counted_P, other=0)
        room = tl.minimum(seq_len, width) - tl.sum(above_P, 0)
        above = tl.sum(tl.where(pieces_P < piece, above_P, 0), 0)
        equal = tl.sum(tl.where(pieces_P < piece, equal_P, 0), 0)
        for tile in range(TILES):
            keys_S = (piece * TILES + tile) * TILE + tl.arange(0, TILE)
            seen_S = keys_S < seq_len
            scores_S = tl.load(scores + row * num_keys + keys_S, mask=seen_S, other=0.0)
            above_S = (seen_S & (scores_S > threshold)).to(tl.int32)
            equal_S = (seen_S & (scores_S == threshold)).to(tl.int32)
            equal_before_S = equal + tl.cumsum(equal_S, 0) - equal_S
            kept_S = (above_S > 0) | ((equal_S > 0) & (equal_before_S < room))
            places_S = above + tl.cumsum(above_S, 0) - above_S + tl.minimum(equal_before_S, room)
            blocks_S = tl.load(block_table + request * table_stride_R + keys_S // block_size, mask=kept_S, other=0)
            tl.store(
                slots + row * slots_stride_T + places_S,
                blocks_S * block_size + keys_S % block_size,
                mask=kept_S & (places_S < width),
            )
            above += tl.sum(above_S, 0)
            equal += tl.sum(equal_S, 0)
