"""Decode attention over selected tokens of a latent cache on Hopper, with four gathering warps and two multiplying
warpgroups.

A selected token's latent lies anywhere. So instead of the copy engine of `attention.kernels.mla.hopper`, threads copy
rows by their own pointers, 16 bytes at a time and without registers. The multiplying warps are the same
(`attention.kernels.mla.hopper_attend`). Legend as in `attention.kernels.mla.decode`; S keys of a tile.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from attention.kernels.mla.hopper_attend import LATENT, ROTARY, STAGES, LatentResults, attend, new_buffers
from attention.kernels.mla.hopper_work import find_work, next_request, request_cost, tiles_with_keys
from attention.kernels.mla.plan import LOG2_E, TILE, MLADecodePlan, heads_of_a_program, requests_of_a_block
from baton.tritonlib.gluon_launch import await_warps

# Registers of a gathering thread, for four rows' pointers and the next rows' slots.
_REGISTERS = 72
# Registers of each thread until the warps redistribute them, for a program of few heads with eight warps. The limit is
# as in `hopper`: without it a program takes a multiprocessor's whole register file.
_MAX_REGISTERS = 168


def serves(q_RHC: Tensor, kv_layer: Tensor, latent: int) -> bool:
    """Whether this kernel supports the sizes, and rows begin at multiples of 16 bytes."""
    stride_B, stride_N = kv_layer.stride()[1:3]
    return (
        latent == LATENT
        and kv_layer.shape[-1] == LATENT + ROTARY
        and q_RHC.dtype in (torch.bfloat16, torch.float16)
        and kv_layer.dtype == q_RHC.dtype
        and stride_N % 8 == 0
        and stride_B % 8 == 0
        and kv_layer.stride(-1) == 1
        and kv_layer.data_ptr() % 16 == 0
    )


def launch(
    q_RHC: Tensor,
    kv_layer: Tensor,
    *,
    counts: Tensor,
    slots: Tensor,
    plan: MLADecodePlan,
    scale: float,
    out: Tensor,
    lse_HR: Tensor | None,
) -> None:
    """Launches the kernel: each query attends to the first `counts` of its slots [R, K] int32."""
    num_reqs, num_heads, _ = q_RHC.shape
    block_h = heads_of_a_program(num_heads)
    _decode_gathered[(plan.num_workers * triton.cdiv(num_heads, block_h),)](
        kv_layer,
        q_RHC,
        counts,
        slots,
        out,
        lse_HR,
        plan.partial_output,
        plan.partial_lse,
        scale * LOG2_E,
        num_reqs,
        num_heads,
        plan.num_workers,
        kv_layer.shape[2],
        *kv_layer.stride()[1:3],
        *q_RHC.stride()[:2],
        slots.stride(0),
        *out.stride()[:2],
        *(lse_HR.stride() if lse_HR is not None else (0, 0)),
        LATENT=LATENT,
        ROTARY=ROTARY,
        SPLIT_TILES=plan.split_tiles,
        TILE=TILE,
        STAGES=STAGES,
        BLOCK_R=requests_of_a_block(num_reqs),
        BLOCK_H=block_h,
        REGISTERS=_REGISTERS,
        num_warps=8 if block_h == 64 else 4,
        maxnreg=None if block_h == 64 else _MAX_REGISTERS,
    )


@gluon.jit(do_not_specialize=["num_reqs", "slots_stride_R"])
def _decode_gathered(
    kv,
    q,
    counts,
    slots,
    out,
    lse,
    partial_output,
    partial_lse,
    scale,
    num_reqs,
    num_heads,
    num_workers,
    block_size,
    kv_stride_B,
    kv_stride_N,
    q_stride_R,
    q_stride_H,
    slots_stride_R,
    out_stride_R,
    out_stride_H,
    lse_stride_H,
    lse_stride_R,
    LATENT: gl.constexpr,
    ROTARY: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCK_H: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Runs one worker for BLOCK_H heads. Workers of the same keys are neighbours, so that one finds the keys in L2."""
    dtype: gl.constexpr = kv.dtype.element_ty
    buffers = new_buffers(dtype, LATENT, ROTARY, TILE, STAGES, BLOCK_H)
    head_blocks = gl.cdiv(num_heads, BLOCK_H)
    worker = gl.program_id(0) // head_blocks
    head_start = (gl.program_id(0) % head_blocks) * BLOCK_H
    work = find_work(counts, num_reqs, worker, num_workers, SPLIT_TILES, TILE, BLOCK_R)
    results = LatentResults(
        out, lse, partial_output, partial_lse, None, worker, head_start, num_heads, out_stride_R, out_stride_H,
        lse_stride_H, lse_stride_R,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend, (q, results, buffers, counts, work, scale, q_stride_R, q_stride_H, SPLIT_TILES, 1, False)),
            (
                _gather_tiles,
                (kv, buffers, counts, slots, work, block_size, kv_stride_B, kv_stride_N, slots_stride_R, SPLIT_TILES),
            ),
        ],
        [4],
        [REGISTERS],
    )


@gluon.jit
def _gather_tiles(
    kv,
    buffers,
    counts,
    slots,
    work,
    block_size,
    kv_stride_B,
    kv_stride_N,
    slots_stride_R,
    SPLIT_TILES: gl.constexpr,
):
    """Gathers every tile of the worker's requests as soon as a buffer is free."""
    tiles_L, tiles_P, full, empty = buffers.tiles_L, buffers.tiles_P, buffers.full, buffers.empty
    STAGES: gl.constexpr = tiles_L.shape[0]
    TILE: gl.constexpr = tiles_L.shape[1]
    LATENT: gl.constexpr = tiles_L.shape[2]
    ROTARY: gl.constexpr = tiles_P.shape[2]
    # A warp copies 128 bytes of each of four rows at a time.
    CHANNELS: gl.constexpr = 64
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    keys_S = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    channels = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, layout))
    request, request_start, position = work.request, work.request_start, work.position
    count = 0
    while position < work.stop_position:
        num_keys = gl.load(counts + request)
        cost = request_cost(num_keys, SPLIT_TILES, TILE)
        row = slots + request.to(gl.int64) * slots_stride_R
        first, last = tiles_with_keys(work, request_start, position, cost, num_keys, TILE)
        slots_S = _load_slots(row, first, keys_S, num_keys, TILE)
        for tile in range(first, last):
            buffer = count % STAGES
            rows_S = kv + (slots_S // block_size).to(gl.int64) * kv_stride_B + (slots_S % block_size) * kv_stride_N
            rows = gl.expand_dims(rows_S, 1) + gl.expand_dims(channels, 0)
            mbarrier.wait(empty.index(buffer), ((count // STAGES) & 1) ^ 1)
            for start in gl.static_range(0, LATENT, CHANNELS):
                part = tiles_L.index(buffer).slice(start, CHANNELS, dim=1)
                async_copy.async_copy_global_to_shared(part, rows + start)
            for start in gl.static_range(0, ROTARY, CHANNELS):
                part = tiles_P.index(buffer).slice(start, CHANNELS, dim=1)
                async_copy.async_copy_global_to_shared(part, rows + (LATENT + start))
            async_copy.commit_group()
            slots_S = _load_slots(row, tile + 1, keys_S, num_keys, TILE)
            # Meanwhile the other buffer's tile is multiplied, which takes longer.
            async_copy.wait_group(0)
            # NOTE: the tensor cores read by another path than the copies wrote, so each thread fences its own writes
            # before one thread reports them all.
            fence_async_shared()
            await_warps()
            mbarrier.arrive(full.index(buffer), count=1)
            count += 1
        request, request_start, position = next_request(work, request, request_start, cost)


@gluon.jit
def _load_slots(row, tile, keys_S, num_keys, TILE: gl.constexpr):
    """Loads a tile's slots; past the last slot it repeats the last, because any row works where keys are masked."""
    return gl.load(row + gl.maximum(gl.minimum(tile * TILE + keys_S, num_keys - 1), 0))
