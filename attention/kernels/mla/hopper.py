"""Decode over a latent cache on Hopper: a warp that only loads, and one or two warpgroups that multiply.

What is here says which caches the kernel takes, starts it, and deals the parts to the warps. Legend as in
`attention.kernels.mla.decode`.

On an H200, bfloat16, blocks of 64 tokens, with the merging, requests x keys: 16 heads 32 x 32768: 290 us, 4170 GB/s;
128 x 4096: 157 us; 32 x 1024: 24 us; 1 x 1024: 7 us. 64 heads 64 x 4096: 100 us, 3030 GB/s. 128 heads 128 x 4096:
326 us, 448 TFLOPS; 1 x 65536: 59 us.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from attention.kernels.mla.hopper_load import find_work, load_tiles
from attention.kernels.mla.hopper_math import attend
from attention.kernels.mla.work import (
    LOG2_E,
    TILE,
    MLADecodePlan,
    heads_of_a_program,
    requests_of_a_block,
)
from tritonlib.launch import overlap

# Of DeepSeek V2, V2-Lite and V3. Two tiles of such keys and 64 heads' queries just fit into shared memory.
LATENT = 512
ROTARY = 64
STAGES = 2
# Of a thread, by a program's heads, until the warps part and share them out anew; nothing more is spilled for it.
# NOTE: without it such a program takes a multiprocessor's whole register file, and neither starts before the programs
# in front of it are gone nor lets those behind it start. With 64 heads it takes all shared memory anyway: overlapping
# would save 1 to 3 us there, and one behind the other, over 8192 keys of 1 request, they would take 50 us and not 25.
_MAX_REGISTERS = {16: 96, 32: 160}


def serves(q_RHC: Tensor, kv_layer: Tensor, latent: int) -> bool:
    """Whether the copy engine can read this cache in tiles, and the sizes are those of this kernel."""
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
    # The cache is one table of tokens to the copy engine, whatever else lies between this layer's blocks.
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
    # The tensor cores' rows come in 64s and their columns in 8s: few heads stand in the columns, keys in the rows.
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
        # Here for all warps: the parts below start only now.
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
                load_tiles,
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
