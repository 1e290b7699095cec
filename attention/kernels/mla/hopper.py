"""Decode attention over a latent cache on Hopper, with one loading warp and one or two multiplying warpgroups
(`attention.kernels.mla.hopper_attend`). Legend as in `attention.kernels.mla.decode`.

On an H200, bfloat16, blocks of 64 tokens, with the merging, requests x keys: 16 heads 32 x 32768: 290 us, 4170 GB/s;
128 x 4096: 157 us; 32 x 1024: 24 us; 1 x 1024: 7 us. 64 heads 64 x 4096: 100 us, 3030 GB/s. 128 heads 128 x 4096:
326 us, 448 TFLOPS; 1 x 65536: 59 us.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from attention.kernels.mla.hopper_attend import LATENT, ROTARY, STAGES, LatentResults, attend, new_buffers
from attention.kernels.mla.hopper_work import find_work, next_request, request_cost, tiles_with_keys
from attention.kernels.mla.plan import (
    LOG2_E,
    TILE,
    MLADecodePlan,
    members_of_a_program,
    most_requests,
    requests_of_a_block,
)
from baton.tritonlib.launch import overlap

# Registers of a thread until the warps redistribute them, by a program's members; the limit causes no further spills.
# NOTE: without this bound a program takes a multiprocessor's whole register file: it cannot start before the previous
# kernel's programs end, and the next kernel's cannot start either. With 64 members it takes all shared memory anyway:
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
    tiles: Tensor | None = None,
    out: Tensor,
    lse_HR: Tensor | None,
) -> None:
    # Decodes need no full query tile: `attend` gives them the same bits without.
    num_heads, tokens = q_RHC.shape[1], 1 if tiles is None else plan.tile_tokens
    num_reqs, most_reqs = len(seq_lens), most_requests(len(seq_lens), tiles)
    _, num_blocks, block_size, _, channels = kv_layer.shape
    stride_B, stride_N = kv_layer.stride()[1:3]
    # The copy engine sees the cache as one table of tokens, with other layers' data between this layer's blocks.
    rows_per_block = stride_B // stride_N
    rows = kv_layer.as_strided(((num_blocks - 1) * rows_per_block + block_size, channels), (stride_N, 1))
    piece = min(block_size, TILE)
    block_m = members_of_a_program(num_heads, tokens)
    dtype = gl.bfloat16 if q_RHC.dtype == torch.bfloat16 else gl.float16
    pieces = (
        TensorDescriptor.from_tensor(rows, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
        for shape in ([piece, LATENT], [piece, ROTARY])
    )
    _decode[(plan.num_workers * triton.cdiv(tokens * num_heads, block_m),)](
        *pieces,
        q_RHC,
        seq_lens,
        block_table,
        tiles,
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
        BLOCK_R=requests_of_a_block(most_reqs),
        TOKENS=tokens,
        BLOCK_M=block_m,
        **(overlap(q_RHC.device, rows=most_reqs) if block_m in _MAX_REGISTERS else {"OVERLAP": False}),
        num_warps=8 if block_m == 64 else 4,
        maxnreg=_MAX_REGISTERS.get(block_m),
    )


@gluon.jit(do_not_specialize=["num_reqs", "table_stride_R"])
def _decode(
    kv_L,
    kv_P,
    q,
    seq_lens,
    block_table,
    tiles,
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
    TOKENS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Runs one worker for BLOCK_M members. Workers of the same keys are neighbours, so one finds the keys in L2."""
    dtype: gl.constexpr = kv_L.dtype
    buffers = new_buffers(dtype, LATENT, ROTARY, TILE, STAGES, BLOCK_M)
    member_blocks = gl.cdiv(TOKENS * num_heads, BLOCK_M)
    worker = gl.program_id(0) // member_blocks
    member_start = (gl.program_id(0) % member_blocks) * BLOCK_M
    work = find_work(seq_lens, num_reqs, worker, num_workers, SPLIT_TILES, TILE, BLOCK_R)
    results = LatentResults(
        out, lse, partial_output, partial_lse, tiles, worker, member_start, num_heads, out_stride_R, out_stride_H,
        lse_stride_H, lse_stride_R,
    )  # fmt: skip
    if OVERLAP:
        # All warps call it here, because the parts below start only now.
        gdc_wait()
    gl.warp_specialize(
        [
            (
                attend,
                (q, results, buffers, seq_lens, work, scale, q_stride_R, q_stride_H, SPLIT_TILES, TOKENS, OVERLAP),
            ),
            (
                _load_tiles,
                (
                    kv_L,
                    kv_P,
                    buffers,
                    seq_lens,
                    block_table,
                    tiles,
                    work,
                    block_size,
                    rows_per_block,
                    table_stride_R,
                    SPLIT_TILES,
                    PIECE,
                ),
            ),
        ],
        [1],
        [24],
    )


@gluon.jit
def _load_tiles(
    kv_L,
    kv_P,
    buffers,
    seq_lens,
    block_table,
    tiles,
    work,
    block_size,
    rows_per_block,
    table_stride_R,
    SPLIT_TILES: gl.constexpr,
    PIECE: gl.constexpr,
):
    """Loads every tile of the worker's requests, in pieces of at most a block, as soon as a buffer is free."""
    tiles_L, tiles_P, full, empty = buffers.tiles_L, buffers.tiles_P, buffers.full, buffers.empty
    STAGES: gl.constexpr = tiles_L.shape[0]
    TILE: gl.constexpr = tiles_L.shape[1]
    LATENT: gl.constexpr = tiles_L.shape[2]
    ROTARY: gl.constexpr = tiles_P.shape[2]
    PIECES: gl.constexpr = TILE // PIECE
    request, request_start, position = work.request, work.request_start, work.position
    count = 0
    while position < work.stop_position:
        seq_len = gl.load(seq_lens + request)
        cost = request_cost(seq_len, SPLIT_TILES, TILE)
        table_row = request
        if tiles is not None:
            table_row = gl.load(tiles + 3 * request + 2)
        row = block_table + table_row.to(gl.int64) * table_stride_R
        last_block = (seq_len - 1) // block_size
        first, last = tiles_with_keys(work, request_start, position, cost, seq_len, TILE)
        for tile in range(first, last):
            buffer = count % STAGES
            if PIECES == 1:
                # Loaded before the wait, so that the number has arrived when the buffer is free.
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
        request, request_start, position = next_request(work, request, request_start, cost)
