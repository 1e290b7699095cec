"""Decode over a latent cache on Hopper: a warp that only loads, and one or two warpgroups that multiply.

A tile of keys in shared memory serves three times: as keys, as the keys' rotary part, and as values. With KEYS_FIRST
scores and result are transposed, keys and channels in the rows and heads in the columns; otherwise two warpgroups share
them, each with half of the keys for the scores and half of the channels for the result. Legend as in
`attention.kernels.mla.decode`; S keys of a tile.

On an H200, bfloat16, blocks of 64 tokens, with the merging, requests x keys: 16 heads 32 x 32768: 290 us, 4170 GB/s;
128 x 4096: 157 us; 32 x 1024: 24 us; 1 x 1024: 7 us. 64 heads 64 x 4096: 100 us, 3030 GB/s. 128 heads 128 x 4096:
326 us, 448 TFLOPS; 1 x 65536: 59 us.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.kernels.mla.plan import (
    LOG2_E,
    TILE,
    MLADecodePlan,
    heads_of_a_program,
    requests_of_a_block,
)
from tritonlib.launch import overlap

# Sizes of DeepSeek V2, V2-Lite and V3. Two tiles of such keys and 64 heads' queries just fit into shared memory.
LATENT = 512
ROTARY = 64
STAGES = 2
# Registers of a thread, by a program's heads, until the warps redistribute them; this causes no further spills.
# NOTE: without this bound a program takes a multiprocessor's whole register file: it cannot start before the previous
# kernel's programs end, and the next kernel's cannot start either. With 64 heads it takes all shared memory anyway:
# overlapping would save 1 to 3 us there, and two in sequence over 8192 keys of 1 request would take 50 us, not 25.
_MAX_REGISTERS = {16: 96, 32: 160}


def serves(q_RHC: Tensor, kv_layer: Tensor, latent: int) -> bool:
    """Whether the copy engine can read this cache in tiles, and this kernel supports the sizes."""
    _, num_blocks, block_size, _, channels = kv_layer.shape
    stride_B, stride_N = kv_layer.stride()[1:3]
    return (
        latent == LATENT
        and channels == LATENT + ROTARY
        and q_RHC.dtype in (torch.bfloat16, torch.float16)
        and kv_layer.dtype == q_RHC.dtype
        and (block_size % TILE == 0 or block_size in (8, 16, 32))
        and stride_N % 8 == 0
        and stride_B % stride_N == 0
        and num_blocks * (stride_B // stride_N) < 2**31
        and kv_layer.data_ptr() % 16 == 0
    )


def launch(
    q_RHC: Tensor,
    kv_layer: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor,
    plan: MLADecodePlan,
    scale: float,
    out: Tensor,
    lse_HR: Tensor | None,
) -> None:
    num_reqs, num_heads, _ = q_RHC.shape
    _, num_blocks, block_size, _, channels = kv_layer.shape
    stride_B, stride_N = kv_layer.stride()[1:3]
    # To the copy engine the cache is one table of tokens, with other layers' data between this layer's blocks.
    rows_per_block = stride_B // stride_N
    rows = kv_layer.as_strided(((num_blocks - 1) * rows_per_block + block_size, channels), (stride_N, 1))
    piece = min(block_size, TILE)
    block_h = heads_of_a_program(num_heads)
    dtype = gl.bfloat16 if q_RHC.dtype == torch.bfloat16 else gl.float16
    pieces = (
        TensorDescriptor.from_tensor(rows, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
        for shape in ([piece, LATENT], [piece, ROTARY])
    )
    _decode[(plan.num_workers * triton.cdiv(num_heads, block_h),)](
        *pieces,
        q_RHC,
        seq_lens,
        block_table,
        out,
        lse_HR,
        plan.partial_output,
        plan.partial_lse,
        scale * LOG2_E,
        num_reqs,
        num_heads,
        plan.num_workers,
        block_size,
        rows_per_block,
        *q_RHC.stride()[:2],
        block_table.stride(0),
        *out.stride()[:2],
        *(lse_HR.stride() if lse_HR is not None else (0, 0)),
        LATENT=LATENT,
        ROTARY=ROTARY,
        SPLIT_TILES=plan.split_tiles,
        TILE=TILE,
        PIECE=piece,
        STAGES=STAGES,
        BLOCK_R=requests_of_a_block(num_reqs),
        BLOCK_H=block_h,
        **(overlap(q_RHC.device, rows=num_reqs) if block_h in _MAX_REGISTERS else {"OVERLAP": False}),
        num_warps=8 if block_h == 64 else 4,
        maxnreg=_MAX_REGISTERS.get(block_h),
    )


@gluon.jit(do_not_specialize=["num_reqs", "table_stride_R"])
def _decode(
    kv_L,
    kv_P,
    q,
    seq_lens,
    block_table,
    out,
    lse,
    partial_output,
    partial_lse,
    scale,
    num_reqs,
    num_heads,
    num_workers,
    block_size,
    rows_per_block,
    q_stride_R,
    q_stride_H,
    table_stride_R,
    out_stride_R,
    out_stride_H,
    lse_stride_H,
    lse_stride_R,
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One worker and BLOCK_H heads. Workers of the same keys are neighbours, so that one of them finds these in L2."""
    dtype: gl.constexpr = kv_L.dtype
    # The tensor cores' rows come in 64s and their columns in 8s: few heads are in the columns, keys in the rows.
    KEYS_FIRST: gl.constexpr = BLOCK_H < 64
    weights_shape: gl.constexpr = [TILE, BLOCK_H] if KEYS_FIRST else [BLOCK_H, TILE]
    layout_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, LATENT], dtype)
    layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, ROTARY], dtype)
    q_layout_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, LATENT], dtype)
    q_layout_P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, ROTARY], dtype)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(weights_shape, dtype)
    tiles_L = gl.allocate_shared_memory(dtype, [STAGES, TILE, LATENT], layout_L)
    tiles_P = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROTARY], layout_P)
    q_L = gl.allocate_shared_memory(dtype, [BLOCK_H, LATENT], q_layout_L)
    q_P = gl.allocate_shared_memory(dtype, [BLOCK_H, ROTARY], q_layout_P)
    weights = gl.allocate_shared_memory(dtype, weights_shape, weights_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    head_blocks = gl.cdiv(num_heads, BLOCK_H)
    worker = gl.program_id(0) // head_blocks
    head_start = (gl.program_id(0) % head_blocks) * BLOCK_H
    request, request_start, position, stop_position = find_work(
        seq_lens, num_reqs, worker, num_workers, SPLIT_TILES, TILE, BLOCK_R
    )
    if OVERLAP:
        # Called here for all warps: the parts below start only now.
        gdc_wait()
    gl.warp_specialize(
        [
            (
                attend,
                (
                    q,
                    out,
                    lse,
                    partial_output,
                    partial_lse,
                    tiles_L,
                    tiles_P,
                    q_L,
                    q_P,
                    weights,
                    full,
                    empty,
                    seq_lens,
                    request,
                    request_start,
                    position,
                    stop_position,
                    worker,
                    head_start,
                    num_heads,
                    scale,
                    q_stride_R,
                    q_stride_H,
                    out_stride_R,
                    out_stride_H,
                    lse_stride_H,
                    lse_stride_R,
                    SPLIT_TILES,
                    TILE,
                    STAGES,
                    LATENT,
                    BLOCK_H,
                    KEYS_FIRST,
                    OVERLAP,
                ),
            ),
            (
                _load_tiles,
                (
                    kv_L,
                    kv_P,
                    tiles_L,
                    tiles_P,
                    full,
                    empty,
                    seq_lens,
                    block_table,
                    request,
                    request_start,
                    position,
                    stop_position,
                    block_size,
                    rows_per_block,
                    table_stride_R,
                    SPLIT_TILES,
                    TILE,
                    PIECE,
                    STAGES,
                    LATENT,
                    ROTARY,
                ),
            ),
        ],
        [1],
        [24],
    )


@gluon.jit
def request_cost(seq_len, SPLIT_TILES: gl.constexpr, TILE: gl.constexpr):
    """As in `attention.kernels.mla.plan`, and so is `find_work`: Gluon cannot call functions written for Triton."""
    tiles = (seq_len + TILE - 1) // TILE
    if SPLIT_TILES:
        tiles = (tiles + SPLIT_TILES - 1) // SPLIT_TILES * SPLIT_TILES
    return tiles


@gluon.jit
def _add(first, second):
    return first + second


@gluon.jit
def find_work(
    seq_lens, num_reqs, worker, num_workers, SPLIT_TILES: gl.constexpr, TILE: gl.constexpr, BLOCK_R: gl.constexpr
):
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([max(1, BLOCK_R // (32 * WARPS))], [32], [WARPS], [0])
    requests_R = gl.arange(0, BLOCK_R, layout=layout)
    lens_R = gl.load(seq_lens + requests_R, mask=requests_R < num_reqs, other=0)
    costs_R = request_cost(lens_R, SPLIT_TILES, TILE)
    stops_R = gl.associative_scan(costs_R, 0, _add)
    total = gl.sum(costs_R, 0)
    if SPLIT_TILES:
        share = gl.cdiv(total // SPLIT_TILES, num_workers) * SPLIT_TILES
    else:
        share = gl.cdiv(total, num_workers)
    start = gl.minimum(worker * share, total)
    stop = gl.minimum(start + share, total)
    behind_R = stops_R <= start
    request = gl.sum(behind_R.to(gl.int32), 0)
    request_start = gl.sum(gl.where(behind_R, costs_R, 0), 0)
    return request, request_start, start, stop


@gluon.jit
def _load_tiles(
    kv_L,
    kv_P,
    tiles_L,
    tiles_P,
    full,
    empty,
    seq_lens,
    block_table,
    request,
    request_start,
    position,
    stop_position,
    block_size,
    rows_per_block,
    table_stride_R,
    SPLIT_TILES: gl.constexpr,
    TILE: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
):
    """Every tile of the worker's requests, in pieces of at most a block, as soon as a buffer is free."""
    PIECES: gl.constexpr = TILE // PIECE
    count = 0
    while position < stop_position:
        seq_len = gl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        row = block_table + request.to(gl.int64) * table_stride_R
        last_block = (seq_len - 1) // block_size
        first = position - request_start
        last = gl.minimum(gl.minimum(stop_position - request_start, cost), gl.cdiv(seq_len, TILE))
        for tile in range(first, last):
            buffer = count % STAGES
            if PIECES == 1:
                # Loaded before the wait, so that the number is there when the buffer is free.
                block = gl.load(row + tile * TILE // block_size)
                mbarrier.wait(empty.index(buffer), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(buffer), TILE * (LATENT + ROTARY) * 2)
                kv_row = block * rows_per_block + tile * TILE % block_size
                tma.async_copy_global_to_shared(kv_L, [kv_row, 0], full.index(buffer), tiles_L.index(buffer))
                tma.async_copy_global_to_shared(kv_P, [kv_row, LATENT], full.index(buffer), tiles_P.index(buffer))
            else:
                mbarrier.wait(empty.index(buffer), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(buffer), TILE * (LATENT + ROTARY) * 2)
                for piece in gl.static_range(PIECES):
                    # Past the request's own blocks any block works, because its keys are masked.
                    kv_row = gl.load(row + gl.minimum(tile * PIECES + piece, last_block)) * rows_per_block
                    target_L = tiles_L.index(buffer).slice(piece * PIECE, PIECE, dim=0)
                    target_P = tiles_P.index(buffer).slice(piece * PIECE, PIECE, dim=0)
                    tma.async_copy_global_to_shared(kv_L, [kv_row, 0], full.index(buffer), target_L)
                    tma.async_copy_global_to_shared(kv_P, [kv_row, LATENT], full.index(buffer), target_P)
            count += 1
        position = gl.minimum(stop_position, request_start + cost)
        request_start += cost
        request += 1


@gluon.jit
def attend(
    q,
    out,
    lse,
    partial_output,
    partial_lse,
    tiles_L,
    tiles_P,
    q_L,
    q_P,
    weights,
    full,
    empty,
    seq_lens,
    request,
    request_start,
    position,
    stop_position,
    worker,
    head_start,
    num_heads,
    scale,
    q_stride_R,
    q_stride_H,
    out_stride_R,
    out_stride_H,
    lse_stride_H,
    lse_stride_R,
    SPLIT_TILES: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LATENT: gl.constexpr,
    BLOCK_H: gl.constexpr,
    KEYS_FIRST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """This worker's parts of requests, one after another."""
    if OVERLAP:
        # NOTE: not earlier. Only here have the warps redistributed their registers (`setmaxnreg`). With this at the
        # kernel's start, where it saves no more time, a program hung at its first matrix product within 80 steps of
        # DeepSeek-V2-Lite under torch's profiler, in 12 runs of 12; without a profiler never.
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = WARPS // 4
    AXIS: gl.constexpr = 0 if KEYS_FIRST else 1
    mma_S: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, BLOCK_H if KEYS_FIRST else TILE // GROUPS, 16]
    )
    mma_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, GROUPS], instr_shape=[16, BLOCK_H if KEYS_FIRST else LATENT // GROUPS, 16]
    )
    per_head_L: gl.constexpr = gl.SliceLayout(AXIS, mma_L)
    scores_shape: gl.constexpr = [TILE, BLOCK_H] if KEYS_FIRST else [BLOCK_H, TILE]
    out_shape: gl.constexpr = [LATENT, BLOCK_H] if KEYS_FIRST else [BLOCK_H, LATENT]
    heads_H = head_start + gl.arange(0, BLOCK_H, layout=per_head_L)
    keys_S = gl.arange(0, TILE, layout=gl.SliceLayout(1 - AXIS, mma_S))
    columns = _across_heads(gl.arange(0, LATENT, layout=gl.SliceLayout(1 - AXIS, mma_L)), KEYS_FIRST)
    head_mask = heads_H < num_heads
    mask = _along_heads(head_mask, KEYS_FIRST)
    count = 0
    while position < stop_position:
        seq_len = gl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        first = position - request_start
        last = gl.minimum(stop_position - request_start, cost)
        if SPLIT_TILES:
            last = gl.minimum(last, first + SPLIT_TILES)
        if cost > 0:
            _load_queries(q + request.to(gl.int64) * q_stride_R, q_stride_H, q_L, q_P, head_start, num_heads)
            highest_H = gl.full([BLOCK_H], -float("inf"), gl.float32, layout=gl.SliceLayout(AXIS, mma_S))
            total = gl.zeros(scores_shape, gl.float32, layout=mma_S)
            acc = gl.zeros(out_shape, gl.float32, layout=mma_L)
            last_full = gl.minimum(last, seq_len // TILE)
            for _ in range(first, last_full):
                buffer = count % STAGES
                mbarrier.wait(full.index(buffer), (count // STAGES) & 1)
                tile_L = tiles_L.index(buffer)
                tile_P = tiles_P.index(buffer)
                scores = _scores(tile_L, tile_P, q_L, q_P, scores_shape, mma_S, KEYS_FIRST) * scale
                acc, highest_H, total = _add_tile(tile_L, weights, scores, acc, highest_H, total, KEYS_FIRST)
                # NOTE: at once. Queueing the next scores after this product, and waiting only then, is slower by 3 to
                # 10 %: the next tile is requested later.
                mbarrier.arrive(empty.index(buffer), count=1)
                count += 1
            if last_full * TILE < gl.minimum(last * TILE, seq_len):
                # The request's last tile, with fewer keys.
                buffer = count % STAGES
                num_keys = seq_len - last_full * TILE
                mbarrier.wait(full.index(buffer), (count // STAGES) & 1)
                tile_L = tiles_L.index(buffer)
                tile_P = tiles_P.index(buffer)
                _clear_rows(tile_L, num_keys, TILE, LATENT)
                scores = _scores(tile_L, tile_P, q_L, q_P, scores_shape, mma_S, KEYS_FIRST) * scale
                scores = gl.where(_across_heads(keys_S < num_keys, KEYS_FIRST), scores, -float("inf"))
                acc, highest_H, total = _add_tile(tile_L, weights, scores, acc, highest_H, total, KEYS_FIRST)
                mbarrier.arrive(empty.index(buffer), count=1)
                count += 1
            total_H = gl.convert_layout(gl.sum(total, AXIS), per_head_L)
            acc = acc / _along_heads(total_H, KEYS_FIRST)
            lse_H = (gl.convert_layout(highest_H, per_head_L) + gl.log2(total_H)) * 0.6931471805599453
            if (first == 0) & (last == cost):
                rows_H = request.to(gl.int64) * out_stride_R + heads_H * out_stride_H
                gl.store(out + _along_heads(rows_H, KEYS_FIRST) + columns, acc.to(out.dtype.element_ty), mask=mask)
                if lse is not None:
                    gl.store(lse + heads_H * lse_stride_H + request.to(gl.int64) * lse_stride_R, lse_H, mask=head_mask)
            else:
                # The first part of a request is the last of its worker.
                slot = 2 * worker + (first == 0).to(gl.int32)
                if SPLIT_TILES:
                    slot = position // SPLIT_TILES
                rows_H = slot.to(gl.int64) * num_heads + heads_H
                gl.store(partial_output + _along_heads(rows_H * LATENT, KEYS_FIRST) + columns, acc, mask=mask)
                gl.store(partial_lse + rows_H, lse_H, mask=head_mask)
        position = request_start + last
        if last == cost:
            request_start += cost
            request += 1


@gluon.jit
def _along_heads(x_H, KEYS_FIRST: gl.constexpr):
    return gl.expand_dims(x_H, 0 if KEYS_FIRST else 1)


@gluon.jit
def _across_heads(x, KEYS_FIRST: gl.constexpr):
    """A vector of keys or channels with an axis for heads."""
    return gl.expand_dims(x, 1 if KEYS_FIRST else 0)


@gluon.jit
def _load_queries(q, q_stride_H, q_L, q_P, head_start, num_heads):
    """Loads one request's queries into shared memory; heads past the last are 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    heads_H = head_start + gl.arange(0, q_L.shape[0], layout=gl.SliceLayout(1, layout))
    channels_L = gl.arange(0, q_L.shape[1], layout=gl.SliceLayout(0, layout))
    channels_P = q_L.shape[1] + gl.arange(0, q_P.shape[1], layout=gl.SliceLayout(0, layout))
    rows = q + heads_H[:, None] * q_stride_H
    mask = (heads_H < num_heads)[:, None]
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
def _add_tile(tile_L, weights_tile, scores, acc, highest_H, total, KEYS_FIRST: gl.constexpr):
    """Adds a tile; returns (values, highest scores, weights) so far: the usual online softmax, except that weights are
    summed over a tile's keys only at the end."""
    AXIS: gl.constexpr = 0 if KEYS_FIRST else 1
    new_highest_H = gl.maximum(highest_H, gl.max(scores, AXIS))
    shrink_H = gl.exp2(highest_H - new_highest_H)
    weights = gl.exp2(scores - _along_heads(new_highest_H, KEYS_FIRST))
    total = total * _along_heads(shrink_H, KEYS_FIRST) + weights
    weights_tile.store(weights.to(tile_L.dtype))
    fence_async_shared()
    acc = acc * _along_heads(gl.convert_layout(shrink_H, gl.SliceLayout(AXIS, acc.type.layout)), KEYS_FIRST)
    if KEYS_FIRST:
        acc = warpgroup_mma(tile_L.permute((1, 0)), weights_tile, acc, is_async=True)
    else:
        acc = warpgroup_mma(weights_tile, tile_L, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,)), new_highest_H, total


@gluon.jit
def _clear_rows(tile_L, num_keys, TILE: gl.constexpr, LATENT: gl.constexpr):
    """Writes zeros past the request's end, where memory may hold NaN: a weight of 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    for start in gl.static_range(0, LATENT, 64):
        part = tile_L.slice(start, 64, dim=1)
        part.store(gl.where((rows < num_keys)[:, None], part.load(layout), 0.0))
    fence_async_shared()
