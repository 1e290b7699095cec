"""The multiplying warps that both Hopper kernels of latent decodes share.

With few members, scores and result are transposed: keys and channels are rows, members are columns. Otherwise two
warpgroups share them, each with half of the keys for the scores and half of the channels for the result. With a fixed
split both give the same bits: the instruction adds the same 16 products at a time, a member's weights are summed as
integers, and the compiler has no choice of what to round (`tests/unit/attention/test_mla_query_tiles.py`, on a GPU).
Legend as in `attention.kernels.mla.plan`; S keys of a tile.
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
from triton.language.extra.cuda import gdc_launch_dependents

from attention.kernels.mla.hopper_work import request_cost

# Sizes of DeepSeek V2, V2-Lite and V3. Two tiles of such keys and 64 heads' queries just fit into shared memory.
LATENT = 512
ROTARY = 64
STAGES = 2
# The tensor cores' rows come in 64s and their columns in 8s, so few members are columns and keys are rows.
KEYS_FIRST_BELOW = gl.constexpr(64)


class LatentBuffers(NamedTuple):
    """Shared memory of a program: a ring of tiles with its barriers, the queries, and a tile's weights. A tile serves
    as keys and, without its rotary channels, as values."""

    tiles_L: gl.shared_memory_descriptor
    tiles_P: gl.shared_memory_descriptor
    q_L: gl.shared_memory_descriptor
    q_P: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class LatentResults(NamedTuple):
    """The places for a program's results, of the members from `member_start` on. Results of requests that workers share
    go to slots of the `worker`."""

    out: gl.tensor
    lse: gl.tensor | None
    partial_output: gl.tensor
    partial_lse: gl.tensor
    tiles: gl.tensor | None
    worker: gl.tensor
    member_start: gl.tensor
    num_heads: gl.tensor
    out_stride_R: gl.tensor
    out_stride_H: gl.tensor
    lse_stride_H: gl.tensor
    lse_stride_R: gl.tensor


@gluon.jit
def new_buffers(
    dtype: gl.constexpr,
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Allocates a program's shared memory and initialises its barriers."""
    weights_shape: gl.constexpr = [TILE, BLOCK_M] if BLOCK_M < KEYS_FIRST_BELOW else [BLOCK_M, TILE]
    layout_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, LATENT], dtype)
    layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROTARY], dtype)
    q_layout_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, LATENT], dtype)
    q_layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, ROTARY], dtype)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(weights_shape, dtype)
    tiles_L = gl.allocate_shared_memory(dtype, [STAGES, TILE, LATENT], layout_L)
    tiles_P = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROTARY], layout_P)
    q_L = gl.allocate_shared_memory(dtype, [BLOCK_M, LATENT], q_layout_L)
    q_P = gl.allocate_shared_memory(dtype, [BLOCK_M, ROTARY], q_layout_P)
    weights = gl.allocate_shared_memory(dtype, weights_shape, weights_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return LatentBuffers(tiles_L, tiles_P, q_L, q_P, weights, full, empty)


@gluon.jit
def attend(
    q,
    results,
    buffers,
    seq_lens,
    work,
    scale,
    q_stride_R,
    q_stride_H,
    SPLIT_TILES: gl.constexpr,
    TOKENS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Computes this worker's parts of requests, one after another."""
    if OVERLAP:
        # NOTE: do not move this earlier. Only here have the warps redistributed their registers (`setmaxnreg`). At the
        # kernel's start it saves no more time, and a program hung at its first matrix product within 80 steps of
        # DeepSeek-V2-Lite under torch's profiler, in 12 runs of 12; without a profiler never.
        gdc_launch_dependents()
    STAGES: gl.constexpr = buffers.tiles_L.shape[0]
    TILE: gl.constexpr = buffers.tiles_L.shape[1]
    LATENT: gl.constexpr = buffers.tiles_L.shape[2]
    BLOCK_M: gl.constexpr = buffers.q_L.shape[0]
    KEYS_FIRST: gl.constexpr = BLOCK_M < KEYS_FIRST_BELOW
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = WARPS // 4
    AXIS: gl.constexpr = 0 if KEYS_FIRST else 1
    SLOT_TOKENS: gl.constexpr = 1 if results.tiles is None else TOKENS
    mma_S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, BLOCK_M if KEYS_FIRST else TILE // GROUPS, 16]
    )
    mma_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, BLOCK_M if KEYS_FIRST else LATENT // GROUPS, 16]
    )
    per_member_L: gl.constexpr = gl.SliceLayout(AXIS, mma_L)
    scores_shape: gl.constexpr = [TILE, BLOCK_M] if KEYS_FIRST else [BLOCK_M, TILE]
    out_shape: gl.constexpr = [LATENT, BLOCK_M] if KEYS_FIRST else [BLOCK_M, LATENT]
    tiles_L, tiles_P, q_L, q_P = buffers.tiles_L, buffers.tiles_P, buffers.q_L, buffers.q_P
    weights, full, empty = buffers.weights, buffers.full, buffers.empty
    out, lse, partial_output, partial_lse = results.out, results.lse, results.partial_output, results.partial_lse
    worker, member_start, num_heads = results.worker, results.member_start, results.num_heads
    request, request_start, position = work.request, work.request_start, work.position
    members_M = member_start + gl.arange(0, BLOCK_M, layout=per_member_L)
    scored_M = member_start + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(AXIS, mma_S))
    keys_S = gl.arange(0, TILE, layout=gl.SliceLayout(1 - AXIS, mma_S))
    columns = _across_members(gl.arange(0, LATENT, layout=gl.SliceLayout(1 - AXIS, mma_L)), KEYS_FIRST)
    count = 0
    while position < work.stop_position:
        seq_len = gl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        first = position - request_start
        last = gl.minimum(work.stop_position - request_start, cost)
        if SPLIT_TILES:
            last = gl.minimum(last, first + SPLIT_TILES)
        if cost > 0:
            _load_queries(q, q_stride_R, q_stride_H, q_L, q_P, results, request, seq_len, TOKENS)
            highest_M = gl.full([BLOCK_M], -float("inf"), gl.float32, layout=gl.SliceLayout(AXIS, mma_S))
            total = gl.zeros(scores_shape, gl.float32, layout=mma_S)
            acc = gl.zeros(out_shape, gl.float32, layout=mma_L)
            # All members see all keys of these tiles.
            last_full = gl.minimum(last, (seq_len if TOKENS == 1 else seq_len - 1) // TILE)
            for _ in range(first, last_full):
                buffer = count % STAGES
                mbarrier.wait(full.index(buffer), (count // STAGES) & 1)
                tile_L = tiles_L.index(buffer)
                tile_P = tiles_P.index(buffer)
                scores = _scores(tile_L, tile_P, q_L, q_P, scores_shape, mma_S, KEYS_FIRST)
                acc, highest_M, total = _add_tile(tile_L, weights, scores, scale, acc, highest_M, total, KEYS_FIRST)
                # NOTE: wait at once. Queueing the next scores after this product and waiting only then is 3 to 10 %
                # slower, because the next tile is requested later.
                mbarrier.arrive(empty.index(buffer), count=1)
                count += 1
            if last_full * TILE < gl.minimum(last * TILE, seq_len):
                # The request's last tile has fewer keys, at least for some members.
                buffer = count % STAGES
                num_keys = seq_len - last_full * TILE
                mbarrier.wait(full.index(buffer), (count // STAGES) & 1)
                tile_L = tiles_L.index(buffer)
                tile_P = tiles_P.index(buffer)
                _clear_rows(tile_L, num_keys, TILE, LATENT)
                scores = _scores(tile_L, tile_P, q_L, q_P, scores_shape, mma_S, KEYS_FIRST)
                seen = _across_members(keys_S < num_keys, KEYS_FIRST)
                if TOKENS > 1:
                    num_seen_M = num_keys - _tokens_after(seq_len, scored_M, num_heads, TOKENS)
                    seen = seen & (_across_members(keys_S, KEYS_FIRST) < _along_members(num_seen_M, KEYS_FIRST))
                scores = gl.where(seen, scores, -float("inf"))
                acc, highest_M, total = _add_tile(tile_L, weights, scores, scale, acc, highest_M, total, KEYS_FIRST)
                mbarrier.arrive(empty.index(buffer), count=1)
                count += 1
            total_M = gl.convert_layout(_sum_of_keys(total, AXIS, SPLIT_TILES), per_member_L)
            acc = acc / _along_members(total_M, KEYS_FIRST)
            lse_M = (gl.convert_layout(highest_M, per_member_L) + gl.log2(total_M)) * 0.6931471805599453
            exists_M, heads_M, rows_M, places_M = _members(
                results.tiles, request, seq_len, members_M, num_heads, TOKENS
            )
            mask = _along_members(exists_M, KEYS_FIRST)
            if (first == 0) & (last == cost):
                out_M = rows_M * results.out_stride_R + heads_M * results.out_stride_H
                gl.store(out + _along_members(out_M, KEYS_FIRST) + columns, acc.to(out.dtype.element_ty), mask=mask)
                if lse is not None:
                    lse_places_M = heads_M * results.lse_stride_H + rows_M * results.lse_stride_R
                    gl.store(lse + lse_places_M, lse_M, mask=exists_M)
            else:
                # The first part of a request is the last of its worker.
                slot = 2 * worker + (first == 0).to(gl.int32)
                if SPLIT_TILES:
                    slot = position // SPLIT_TILES
                parts_M = (slot.to(gl.int64) * SLOT_TOKENS + places_M) * num_heads + heads_M
                gl.store(partial_output + _along_members(parts_M * LATENT, KEYS_FIRST) + columns, acc, mask=mask)
                gl.store(partial_lse + parts_M, lse_M, mask=exists_M)
        position = request_start + last
        if last == cost:
            request_start += cost
            request += 1


@gluon.jit
def _along_members(x_M, KEYS_FIRST: gl.constexpr):
    return gl.expand_dims(x_M, 0 if KEYS_FIRST else 1)


@gluon.jit
def _across_members(x, KEYS_FIRST: gl.constexpr):
    """Adds an axis for members to a vector of keys or channels."""
    return gl.expand_dims(x, 1 if KEYS_FIRST else 0)


@gluon.jit
def _tokens_after(seq_len, members_M, num_heads, TOKENS: gl.constexpr):
    """Gluon's version of `attention.kernels.mla.plan.tokens_after`."""
    return (seq_len - 1) % TOKENS - members_M // num_heads


@gluon.jit
def _members(tiles, tile, seq_len, members_M, num_heads, TOKENS: gl.constexpr):
    """Gluon's version of `attention.kernels.mla.plan.members_of_tile`."""
    last_row = tile
    count = 1
    if tiles is not None:
        last_row = gl.load(tiles + 3 * tile)
        count = gl.load(tiles + 3 * tile + 1)
    after_M = _tokens_after(seq_len, members_M, num_heads, TOKENS)
    exists_M = (members_M < TOKENS * num_heads) & (after_M >= 0) & (after_M < count)
    return exists_M, members_M % num_heads, (last_row - after_M).to(gl.int64), count - 1 - after_M


@gluon.jit
def _load_queries(q, q_stride_R, q_stride_H, q_L, q_P, results, request, seq_len, TOKENS: gl.constexpr):
    """Loads one request's queries into shared memory; members that do not exist are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    members_M = results.member_start + gl.arange(0, q_L.shape[0], layout=gl.SliceLayout(1, layout))
    exists_M, heads_M, rows_M, _ = _members(results.tiles, request, seq_len, members_M, results.num_heads, TOKENS)
    channels_L = gl.arange(0, q_L.shape[1], layout=gl.SliceLayout(0, layout))
    channels_P = q_L.shape[1] + gl.arange(0, q_P.shape[1], layout=gl.SliceLayout(0, layout))
    rows = q + (rows_M * q_stride_R + heads_M * q_stride_H)[:, None]
    mask = exists_M[:, None]
    q_L.store(gl.load(rows + channels_L[None, :], mask=mask, other=0.0))
    q_P.store(gl.load(rows + channels_P[None, :], mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def _scores(tile_L, tile_P, q_L, q_P, shape: gl.constexpr, layout: gl.constexpr, KEYS_FIRST: gl.constexpr):
    scores = gl.zeros(shape, gl.float32, layout=layout)
    if KEYS_FIRST:
        scores = warpgroup_mma(tile_L, q_L.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(tile_P, q_P.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(q_L, tile_L.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_P, tile_P.permute((1, 0)), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=(scores,))


@gluon.jit
def _add_tile(tile_L, weights_tile, scores, scale, acc, highest_M, total, KEYS_FIRST: gl.constexpr):
    """Adds a tile to the online softmax; returns (values, highest scores, weights) so far. Weights are summed over a
    tile's keys only at the end."""
    AXIS: gl.constexpr = 0 if KEYS_FIRST else 1
    new_highest_M = gl.maximum(highest_M, gl.max(scores, AXIS) * scale)
    shrink_M = gl.exp2(highest_M - new_highest_M)
    ones = gl.full(scores.shape, 1.0, gl.float32, layout=scores.type.layout)
    weights = gl.exp2(gl.fma(scores, ones * scale, ones * _along_members(-new_highest_M, KEYS_FIRST)))
    total = gl.fma(total, ones * _along_members(shrink_M, KEYS_FIRST), weights)
    weights_tile.store(weights.to(tile_L.dtype))
    fence_async_shared()
    acc = acc * _along_members(gl.convert_layout(shrink_M, gl.SliceLayout(AXIS, acc.type.layout)), KEYS_FIRST)
    if KEYS_FIRST:
        acc = warpgroup_mma(tile_L.permute((1, 0)), weights_tile, acc, is_async=True)
    else:
        acc = warpgroup_mma(weights_tile, tile_L, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,)), new_highest_M, total


@gluon.jit
def _sum_of_keys(total, AXIS: gl.constexpr, SPLIT_TILES: gl.constexpr):
    """Sums weights over the keys. With a fixed split the sum must not depend on the layout, so it is one of integers,
    which is exact. A weight is at most 1 in each tile, so the sum is at most 2**30 units."""
    if SPLIT_TILES:
        UNIT: gl.constexpr = 2.0**30 / (total.shape[AXIS] * SPLIT_TILES)
        return gl.sum((total * UNIT).to(gl.int32), AXIS).to(gl.float32) * (1.0 / UNIT)
    return gl.sum(total, AXIS)


@gluon.jit
def _clear_rows(tile_L, num_keys, TILE: gl.constexpr, LATENT: gl.constexpr):
    """Writes zeros past the request's end, where memory may hold NaN: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, LATENT, 64):
        part = tile_L.slice(start, 64, dim=1)
        part.store(gl.where((rows < num_keys)[:, None], part.load(layout), 0.0))
    fence_async_shared()
