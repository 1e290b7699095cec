"""The multiplying warpgroups of the Hopper kernel of prompts in order. Each has 64 rows of a tile, and computes the
weights of one tile of keys while the tensor cores multiply those of the tile before.

Every step is the one of `attention.kernels.in_order.tile` and `attention.kernels.in_order.fold`, rounded alike. Legend:
M rows of a warpgroup, N keys of a tile, V channels, S equal copies of a sum, C rows as they are copied.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
_ROWS = gl.constexpr(64)
_COPIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# A product takes no fewer columns.
_SUMS = gl.constexpr(8)


class OrderedTile(NamedTuple):
    """A program's rows: positions from `start` on, of a request whose queries begin at position `context`; `head` is
    the first of its query heads. Some of them see keys [first_key, key_stop)."""

    start: gl.tensor
    context: gl.tensor
    seq_len: gl.tensor
    query_start: gl.tensor
    head: gl.tensor
    first_key: gl.tensor
    key_stop: gl.tensor


class UnitKeys(NamedTuple):
    """Keys of a unit, a multiple of a tile's, and the limits of a row's keys."""

    unit_keys: gl.tensor
    window: gl.tensor
    chunk: gl.tensor


class _Scored(NamedTuple):
    """The rows' positions and the factor of their scores."""

    positions_M: gl.tensor
    factor: gl.tensor


@gluon.jit
def new_ones(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    """Allocates [S, N] ones, whose product with weights is the sum of the weights."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_SUMS, BLOCK_N], dtype)
    ones_SN = gl.allocate_shared_memory(dtype, [_SUMS, BLOCK_N], layout)
    ones_SN.store(gl.full([_SUMS, BLOCK_N], 1.0, dtype, layout=_COPIES))
    fence_async_shared()
    return ones_SN


@gluon.jit
def attend(
    WARPGROUP: gl.constexpr, rows, scale, buffers, ones_SN, tile, units, SIZES: gl.constexpr, LIMITED: gl.constexpr
):
    """Computes one warpgroup's 64 of a tile's 128 rows."""
    q_ptr, q_stride_t, q_stride_h, out_ptr, out_stride_t, out_stride_h, sinks_ptr = rows
    BLOCK_N: gl.constexpr = SIZES.block_n
    STAGES: gl.constexpr = SIZES.stages
    GROUP: gl.constexpr = SIZES.group
    CHANNELS: gl.constexpr = SIZES.block_v
    mma_N: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    mma_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, 16])
    mma_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _SUMS, 16])
    per_row_N: gl.constexpr = gl.SliceLayout(1, mma_N)
    per_row_V: gl.constexpr = gl.SliceLayout(1, mma_V)
    dtype: gl.constexpr = buffers.k_A.dtype
    q_M = buffers.q_A.index(WARPGROUP)
    _load_queries(WARPGROUP, q_ptr, q_stride_t, q_stride_h, q_M, tile, GROUP)

    members_M = WARPGROUP * _ROWS + gl.arange(0, _ROWS, layout=per_row_N)
    scored = _Scored(tile.start + members_M // GROUP, scale * LOG2_E)
    max_lse2_V = gl.full([_ROWS], -float("inf"), gl.float32, layout=per_row_V)
    total_V = gl.zeros([_ROWS], gl.float32, layout=per_row_V)
    if sinks_ptr is not None:
        members_V = WARPGROUP * _ROWS + gl.arange(0, _ROWS, layout=per_row_V)
        sinks_V = gl.load(sinks_ptr + tile.head + members_V % GROUP)
        max_lse2_V = sinks_V.to(gl.float32) * LOG2_E
        total_V = gl.full([_ROWS], 1.0, gl.float32, layout=per_row_V)
    folded = gl.zeros([_ROWS, CHANNELS], gl.float32, layout=mma_V)

    first = tile.first_key // BLOCK_N
    num_tiles = gl.cdiv(tile.key_stop, BLOCK_N) - first
    unit_stop = first * BLOCK_N // units.unit_keys * units.unit_keys + units.unit_keys
    mbarrier.wait(buffers.full_k.index(0), 0)
    scores = _multiply(q_M, buffers.k_A.index(0), mma_N)
    scores_MN = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(buffers.empty_k.index(0), count=1)
    nothing_M = gl.full([_ROWS], -float("inf"), gl.float32, layout=per_row_N)
    weights, max_M, _ = _softmax(scores_MN, nothing_M, first * BLOCK_N, scored, tile, units, LIMITED, dtype)
    acc = gl.zeros([_ROWS, CHANNELS], gl.float32, layout=mma_V)
    sums = gl.zeros([_ROWS, _SUMS], gl.float32, layout=mma_S)
    if LIMITED:
        mbarrier.wait(buffers.full_v.index(0), 0)
        _keep_keys(buffers.v.index(0), first * BLOCK_N, tile, BLOCK_N, CHANNELS)
    for count in range(1, num_tiles):
        key = (first + count) * BLOCK_N
        last_stage, last_phase = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
        stage, phase = count % STAGES, (count // STAGES) & 1
        mbarrier.wait(buffers.full_k.index(stage), phase)
        scores = _multiply(q_M, buffers.k_A.index(stage), mma_N)
        mbarrier.wait(buffers.full_v.index(last_stage), last_phase)
        new_sums = _add_weights(weights, ones_SN, sums, mma_S)
        new_acc = _add_values(weights, buffers.v.index(last_stage), acc, mma_V)
        scores_MN = warpgroup_mma_wait(2, deps=(scores,))
        mbarrier.arrive(buffers.empty_k.index(stage), count=1)
        begins = key >= unit_stop
        # A unit begins with no keys.
        before_M = gl.where(begins, nothing_M, max_M)
        weights, new_max_M, rescale_M = _softmax(scores_MN, before_M, key, scored, tile, units, LIMITED, dtype)
        acc, sums = warpgroup_mma_wait(0, deps=(new_acc, new_sums))
        mbarrier.arrive(buffers.empty_v.index(last_stage), count=1)
        if begins:
            folded, max_lse2_V, total_V = _fold(folded, max_lse2_V, total_V, acc, sums, max_M)
            acc = gl.zeros([_ROWS, CHANNELS], gl.float32, layout=mma_V)
            sums = gl.zeros([_ROWS, _SUMS], gl.float32, layout=mma_S)
            unit_stop += units.unit_keys
        else:
            acc *= gl.convert_layout(rescale_M, per_row_V)[:, None]
            sums *= gl.convert_layout(rescale_M, gl.SliceLayout(1, mma_S))[:, None]
        max_M = new_max_M

    last_stage, last_phase = (num_tiles - 1) % STAGES, ((num_tiles - 1) // STAGES) & 1
    mbarrier.wait(buffers.full_v.index(last_stage), last_phase)
    last_key = (first + num_tiles - 1) * BLOCK_N
    if tile.key_stop < last_key + BLOCK_N:
        _keep_keys(buffers.v.index(last_stage), last_key, tile, BLOCK_N, CHANNELS)
    new_sums = _add_weights(weights, ones_SN, sums, mma_S)
    new_acc = _add_values(weights, buffers.v.index(last_stage), acc, mma_V)
    acc, sums = warpgroup_mma_wait(0, deps=(new_acc, new_sums))
    folded, max_lse2_V, total_V = _fold(folded, max_lse2_V, total_V, acc, sums, max_M)
    result = folded / gl.where(total_V == 0.0, 1.0, total_V)[:, None]
    _write(WARPGROUP, out_ptr, out_stride_t, out_stride_h, result, q_M, tile, GROUP)


@gluon.jit
def _multiply(q_M, keys_N, layout: gl.constexpr):
    """Starts the product of queries and keys, and does not wait for it."""
    ROWS: gl.constexpr = q_M.shape[0]
    BLOCK_N: gl.constexpr = keys_N.shape[0]
    scores = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=layout)
    return warpgroup_mma(q_M, keys_N.permute((1, 0)), scores, use_acc=False, is_async=True)


@gluon.jit
def _add_weights(weights_MN, ones_SN, sums, layout: gl.constexpr):
    """Starts to add the weights to the sums. The tensor cores do it, because the compiler's own sums depend on the
    layout."""
    weights_MN = gl.convert_layout(weights_MN, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(weights_MN, ones_SN.permute((1, 0)), sums, is_async=True)


@gluon.jit
def _add_values(weights_MN, values_NV, acc, layout: gl.constexpr):
    weights_MN = gl.convert_layout(weights_MN, gl.DotOperandLayout(0, layout, 2))
    return warpgroup_mma(weights_MN, values_NV, acc, is_async=True)


@gluon.jit
def _softmax(scores_MN, max_M, key, scored, tile, units, LIMITED: gl.constexpr, dtype: gl.constexpr):
    """Returns the weights of the tile of keys from `key` on, the rows' new maximum and the factor of earlier sums."""
    BLOCK_N: gl.constexpr = scores_MN.shape[1]
    if LIMITED or key + BLOCK_N > tile.start + 1:
        positions_M = scored.positions_M
        keys_N = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores_MN.type.layout))
        seen_MN = keys_N[None, :] <= gl.minimum(positions_M, tile.key_stop - 1)[:, None]
        if LIMITED:
            first_M = gl.maximum(positions_M - units.window + 1, positions_M // units.chunk * units.chunk)
            seen_MN = seen_MN & (keys_N[None, :] >= gl.maximum(first_M, tile.first_key)[:, None])
        scores_MN = gl.where(seen_MN, scores_MN, -float("inf"))
    new_max_M = gl.maximum(max_M, gl.max(scores_MN, 1) * scored.factor)
    # For a row that has seen no key yet, -inf minus -inf would be NaN.
    safe_max_M = gl.where(new_max_M == -float("inf"), 0.0, new_max_M)
    ones_MN = gl.full(scores_MN.shape, 1.0, gl.float32, layout=scores_MN.type.layout)
    weights_MN = gl.exp2(gl.fma(scores_MN, ones_MN * scored.factor, ones_MN * (-safe_max_M)[:, None]))
    return weights_MN.to(dtype), new_max_M, gl.exp2(max_M - safe_max_M)


@gluon.jit
def _fold(folded, max_lse2_V, total_V, acc, sums, max_M):
    """Adds a unit's result, as `partial_result` and `fold` do."""
    per_row: gl.constexpr = max_lse2_V.type.layout
    sum_V = gl.convert_layout(gl.max(sums, 1), per_row)  # of equal copies
    sum_V = gl.where(sum_V == 0.0, 1.0, sum_V)
    out = acc * (1.0 / sum_V)[:, None]
    lse2_V = gl.convert_layout(max_M, per_row) + gl.log2(sum_V)
    new_max_V = gl.maximum(max_lse2_V, lse2_V)
    safe_max_V = gl.where(new_max_V == -float("inf"), 0.0, new_max_V)
    rescale_V, weight_V = gl.exp2(max_lse2_V - safe_max_V), gl.exp2(lse2_V - safe_max_V)
    ones = gl.full(out.shape, 1.0, gl.float32, layout=out.type.layout)
    folded = gl.fma(folded, ones * rescale_V[:, None], out * weight_V[:, None])
    return folded, new_max_V, gl.fma(total_V, rescale_V, weight_V)


@gluon.jit
def _copied_rows(WARPGROUP: gl.constexpr, tile, GROUP: gl.constexpr):
    """Returns the rows' tokens, their heads and which rows are queries."""
    members_C = WARPGROUP * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _COPIES))
    positions_C = tile.start + members_C // GROUP
    USED: gl.constexpr = 2 * _ROWS // GROUP * GROUP
    valid_C = (members_C < USED) & (positions_C >= tile.context) & (positions_C < tile.seq_len)
    return (tile.query_start + positions_C - tile.context).to(gl.int64), tile.head + members_C % GROUP, valid_C


@gluon.jit
def _load_queries(WARPGROUP: gl.constexpr, q_ptr, stride_t, stride_h, q_M, tile, GROUP: gl.constexpr):
    tokens_C, heads_C, valid_C = _copied_rows(WARPGROUP, tile, GROUP)
    CHANNELS: gl.constexpr = q_M.shape[1]
    channels = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, _COPIES))
    rows_C = q_ptr + tokens_C * stride_t + heads_C * stride_h
    q_M.store(gl.load(rows_C[:, None] + channels[None, :], mask=valid_C[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _write(WARPGROUP: gl.constexpr, out_ptr, stride_t, stride_h, result, q_M, tile, GROUP: gl.constexpr):
    """Writes the rows' results through the memory of their queries, for stores of 16 bytes."""
    q_M.store(result.to(q_M.dtype))
    tokens_C, heads_C, valid_C = _copied_rows(WARPGROUP, tile, GROUP)
    CHANNELS: gl.constexpr = q_M.shape[1]
    channels = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, _COPIES))
    rows_C = out_ptr + tokens_C * stride_t + heads_C * stride_h
    gl.store(rows_C[:, None] + channels[None, :], q_M.load(_COPIES), mask=valid_C[:, None])


@gluon.jit
def _keep_keys(values, key, tile, BLOCK_N: gl.constexpr, CHANNELS: gl.constexpr):
    """Clears values that no row sees, which may be NaN: a weight of 0 times NaN would be NaN."""
    keys_N = key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, _COPIES))
    keep_N = (keys_N >= tile.first_key) & (keys_N < tile.key_stop)
    for start in gl.static_range(0, CHANNELS, 64):
        part = values.slice(start, 64, dim=1)
        part.store(gl.where(keep_N[:, None], part.load(_COPIES), 0.0))
    fence_async_shared()
