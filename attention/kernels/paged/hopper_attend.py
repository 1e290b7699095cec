"""The multiplying warpgroups of the Hopper kernels of attention over a batch. Each has 64 rows of a tile, and computes
the softmax of one tile of keys while the tensor cores multiply the weights of the previous tile.

The legend is that of `attention.kernels.paged.portable`, with A and P for the two parts of the key channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attention.kernels.paged.hopper_rows import ROWS, load_queries, queries_of, write
from attention.kernels.paged.hopper_tile import seen_by


class ScoreOptions(NamedTuple):
    """The values that turn products of queries and keys into scores, in powers of 2. A feature that is None is not
    compiled.

    With a soft cap, `scale2` includes the factor 2 of the hyperbolic tangent's exponent.
    """

    scale2: float
    soft_cap2: float | None
    alibi_slopes_ptr: Tensor | None
    sinks_ptr: Tensor | None


class _Scored(NamedTuple):
    """A warpgroup's rows, as its softmax needs them; the slopes are None without ALiBi."""

    positions_M: gl.tensor
    slopes_M: gl.tensor | None
    seq_len: gl.tensor


@gluon.jit
def attend(
    WARPGROUP: gl.constexpr,
    q,
    out,
    split,
    lse,
    scoring,
    buffers,
    tile,
    sizes: gl.constexpr,
    mask: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Computes one warpgroup's 64 of a tile's 128 rows."""
    q_A, q_P = buffers.q_A.index(WARPGROUP), buffers.q_P.index(WARPGROUP)
    load_queries(WARPGROUP, q, q_A, q_P, tile, sizes)
    queries = queries_of(WARPGROUP, tile, sizes)
    max_M, sum_M = first_sums(queries, split, scoring)
    acc_MV = new_acc(sizes)
    num_tiles = gl.cdiv(tile.stop_key, sizes.block_n) - tile.first_key // sizes.block_n
    if num_tiles > 0:
        scores_MN = multiply_first(q_A, q_P, buffers, 0, sizes)
        acc_MV, weights, max_M, sum_M = attend_keys(
            WARPGROUP, q_A, q_P, scores_MN, max_M, sum_M, queries, buffers, tile, 0, scoring, sizes, mask
        )
        acc_MV = add_last_values(weights, acc_MV, buffers, tile, num_tiles - 1, sizes, mask, PAGED)
    write(WARPGROUP, out, split, lse, acc_MV, max_M, sum_M, q_A, queries, tile, sizes)


@gluon.jit
def first_sums(queries, split, scoring):
    """Returns the rows' maximum and sum before any key: those of the sinks."""
    SPLIT: gl.constexpr = split.out_ptr is not None
    per_row: gl.constexpr = queries.heads_M.type.layout
    if scoring.sinks_ptr is not None:
        sinks_M = gl.load(scoring.sinks_ptr + queries.heads_M, mask=queries.valid_M, other=0.0)
        max_M = sinks_M.to(gl.float32) * 1.4426950408889634
        sum_M = gl.full([ROWS], 1.0, gl.float32, layout=per_row)
        if SPLIT:  # the first split has the sinks
            max_M = gl.where(split.index == 0, max_M, -float("inf"))
            sum_M = gl.where(split.index == 0, sum_M, 0.0)
    else:
        max_M = gl.full([ROWS], -float("inf"), gl.float32, layout=per_row)
        sum_M = gl.zeros([ROWS], gl.float32, layout=per_row)
    return max_M, sum_M


@gluon.jit
def new_acc(sizes: gl.constexpr):
    BLOCK_V: gl.constexpr = sizes.block_v
    mma_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    return gl.zeros([ROWS, BLOCK_V], gl.float32, layout=mma_V)


@gluon.jit
def multiply_first(q_A, q_P, buffers, turn, sizes: gl.constexpr):
    """Returns the products with the tile of keys at place `turn` of the ring, and releases it."""
    BLOCK_N: gl.constexpr = sizes.block_n
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    stage, phase = turn % sizes.stages, (turn // sizes.stages) & 1
    mbarrier.wait(buffers.full_k.index(stage), phase)
    scores = multiply_keys(q_A, q_P, buffers.k_A.index(stage), buffers.k_P.index(stage), sizes.block_p, mma_N)
    scores_MN = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(buffers.empty_k.index(stage), count=1)
    return scores_MN


@gluon.jit
def attend_keys(
    WARPGROUP: gl.constexpr,
    q_A,
    q_P,
    scores_MN,
    max_M,
    sum_M,
    queries,
    buffers,
    tile,
    turn,
    scoring,
    sizes: gl.constexpr,
    mask: gl.constexpr,
):
    """Returns the result without the last tile of values, the weights for those, and the rows' maximum and sum.

    Keys and values are in the rings from place `turn` on; `scores_MN` are the products with the first tile of keys.
    """
    BLOCK_P: gl.constexpr = sizes.block_p
    BLOCK_N: gl.constexpr = sizes.block_n
    STAGES: gl.constexpr = sizes.stages
    LIMITED: gl.constexpr = mask.window != 0 or mask.chunk != 0
    FIRST: gl.constexpr = WARPGROUP * ROWS
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    BLOCK_V: gl.constexpr = sizes.block_v
    mma_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma_V, 2)
    per_row_V: gl.constexpr = gl.SliceLayout(1, mma_V)
    dtype: gl.constexpr = buffers.k_A.dtype
    tiles_A, tiles_P, tiles_V = buffers.k_A, buffers.k_P, buffers.v
    full_k, empty_k, full_v, empty_v = buffers.full_k, buffers.empty_k, buffers.full_v, buffers.empty_v

    query_len, seq_len, first_token = tile.query_len, tile.seq_len, tile.first_token
    start = tile.first_key // BLOCK_N
    stop = gl.maximum(gl.cdiv(tile.stop_key, BLOCK_N), start + 1)
    first_position = seq_len - query_len + first_token + FIRST // sizes.pack
    last_position = seq_len - query_len + gl.minimum(first_token + (FIRST + ROWS - 1) // sizes.pack, query_len - 1)
    _, _, full_start, full_stop = seen_by(first_position, last_position, seq_len, BLOCK_N, mask)
    # A split may begin after the last key that all rows see.
    full_stop = gl.maximum(gl.minimum(full_stop, stop - 1), start)
    full_start = gl.maximum(gl.minimum(full_start, full_stop), start)

    slopes_M = None
    if scoring.alibi_slopes_ptr is not None:
        slopes_M = gl.load(scoring.alibi_slopes_ptr + queries.heads_M, mask=queries.valid_M, other=0.0)
        slopes_M *= 1.4426950408889634
    scored = _Scored(seq_len - query_len + queries.tokens_M, slopes_M, seq_len)
    acc_MV = new_acc(sizes)
    weights_MN, max_M, sum_M, rescale_M = _softmax(
        scores_MN, max_M, sum_M, (stop - 1) * BLOCK_N, scored, scoring, mask, True
    )
    weights = gl.convert_layout(weights_MN.to(dtype), operand)
    if seq_len < stop * BLOCK_N:
        stage, phase = turn % STAGES, (turn // STAGES) & 1
        mbarrier.wait(full_v.index(stage), phase)
        _keep_rows(tiles_V.index(stage), 0, seq_len - (stop - 1) * BLOCK_N, BLOCK_N, BLOCK_V)

    # From the last tile to the first: tiles on the diagonal, tiles that all rows see, tiles that windows cut.
    count = 0
    for part in gl.static_range(3):
        if part != 2 or LIMITED:
            part_start = full_stop if part == 0 else full_start if part == 1 else start
            part_stop = stop - 1 if part == 0 else full_stop if part == 1 else full_start
            for _ in range(part_start, part_stop):
                last_stage, last_phase = (turn + count) % STAGES, ((turn + count) // STAGES) & 1
                count += 1
                stage, phase = (turn + count) % STAGES, ((turn + count) // STAGES) & 1
                mbarrier.wait(full_k.index(stage), phase)
                scores = multiply_keys(q_A, q_P, tiles_A.index(stage), tiles_P.index(stage), BLOCK_P, mma_N)
                mbarrier.wait(full_v.index(last_stage), last_phase)
                acc = warpgroup_mma(weights, tiles_V.index(last_stage), acc_MV, is_async=True)
                scores_MN = warpgroup_mma_wait(1, deps=(scores,))
                mbarrier.arrive(empty_k.index(stage), count=1)
                weights_MN, max_M, sum_M, rescale_M = _softmax(
                    scores_MN, max_M, sum_M, (stop - 1 - count) * BLOCK_N, scored, scoring, mask, part != 1
                )
                acc_MV = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty_v.index(last_stage), count=1)
                acc_MV *= gl.convert_layout(rescale_M, per_row_V)[:, None]
                weights = gl.convert_layout(weights_MN.to(dtype), operand)
    return acc_MV, weights, max_M, sum_M


@gluon.jit
def add_last_values(
    weights, acc_MV, buffers, tile, place, sizes: gl.constexpr, mask: gl.constexpr, PAGED: gl.constexpr
):
    """Returns the result with the tile's last values, which are at that place of the ring."""
    values = await_last_values(buffers, tile, place, sizes, mask, PAGED)
    acc = warpgroup_mma(weights, values, acc_MV, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def await_last_values(buffers, tile, place, sizes: gl.constexpr, mask: gl.constexpr, PAGED: gl.constexpr):
    """Returns the tile's last values, which are at that place of the ring."""
    LIMITED: gl.constexpr = mask.window != 0 or mask.chunk != 0
    stage, phase = place % sizes.stages, (place // sizes.stages) & 1
    mbarrier.wait(buffers.full_v.index(stage), phase)
    values = buffers.v.index(stage)
    first = tile.first_key % sizes.block_n
    if PAGED and LIMITED and first > 0:
        _keep_rows(values, first, sizes.block_n, sizes.block_n, sizes.block_v)
    return values


@gluon.jit
def multiply_keys(q_A, q_P, tile_A, tile_P, BLOCK_P: gl.constexpr, layout: gl.constexpr):
    """Starts the product of queries and keys, and does not wait for it."""
    ROWS: gl.constexpr = q_A.shape[0]
    BLOCK_N: gl.constexpr = tile_A.shape[0]
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    scores = warpgroup_mma(q_A, tile_A.permute((1, 0)), scores, use_acc=False, is_async=True)
    if BLOCK_P:
        scores = warpgroup_mma(q_P, tile_P.permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def _softmax(scores_MN, max_M, sum_M, first_key, queries, scoring, mask: gl.constexpr, MASKED: gl.constexpr):
    """Returns a tile's weights, the rows' new maximum and sum, and the factor for earlier results, all in powers of
    2."""
    WINDOW: gl.constexpr = mask.window
    CHUNK: gl.constexpr = mask.chunk
    SOFT_CAP: gl.constexpr = scoring.soft_cap2 is not None
    ALIBI: gl.constexpr = queries.slopes_M is not None
    positions_M, scale2 = queries.positions_M, scoring.scale2
    keys_N = first_key + gl.arange(0, scores_MN.shape[1], layout=gl.SliceLayout(0, scores_MN.type.layout))
    if SOFT_CAP:
        scores_MN = scoring.soft_cap2 * (1.0 - 2.0 / (gl.exp2(scores_MN * scale2) + 1.0))
    elif ALIBI:
        scores_MN *= scale2
    if ALIBI:
        scores_MN += queries.slopes_M[:, None] * (keys_N[None, :] - positions_M[:, None]).to(gl.float32)
    if MASKED:
        seen_MN = (keys_N < queries.seq_len)[None, :]
        if mask.causal:
            seen_MN = seen_MN & (keys_N[None, :] <= positions_M[:, None])
        elif WINDOW:
            seen_MN = seen_MN & (keys_N[None, :] < positions_M[:, None] + WINDOW)
        if WINDOW:
            seen_MN = seen_MN & (keys_N[None, :] > positions_M[:, None] - WINDOW)
        if CHUNK:
            seen_MN = seen_MN & (keys_N[None, :] >= (positions_M // CHUNK * CHUNK)[:, None])
        scores_MN = gl.where(seen_MN, scores_MN, -float("inf"))
    highest_M = gl.max(scores_MN, 1)
    if not (SOFT_CAP or ALIBI):
        highest_M *= scale2
    new_max_M = gl.maximum(max_M, highest_M)
    base_M = new_max_M
    if MASKED:
        # For a query that has seen no key yet, -inf minus -inf would be NaN.
        base_M = gl.where(new_max_M == -float("inf"), 0.0, new_max_M)
    if SOFT_CAP or ALIBI:
        weights_MN = gl.exp2(scores_MN - base_M[:, None])
    else:
        weights_MN = gl.exp2(scores_MN * scale2 - base_M[:, None])
    rescale_M = gl.exp2(max_M - base_M)
    return weights_MN, new_max_M, sum_M * rescale_M + gl.sum(weights_MN, 1), rescale_M


@gluon.jit
def _keep_rows(tile, first, stop, BLOCK_N: gl.constexpr, CHANNELS: gl.constexpr):
    """Clears values that no query sees, which may be NaN: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, CHANNELS, 64):
        part = tile.slice(start, 64, dim=1)
        part.store(gl.where(((rows >= first) & (rows < stop))[:, None], part.load(layout), 0.0))
    fence_async_shared()
