"""Block-sparse attention of prompts on Hopper, with one loading warp and two multiplying warpgroups.

It computes the same as `attention.kernels.blocksparse.prefill`, in the same order, for 16-bit keys and values. Programs
stay on their multiprocessor and take one tile of queries after another, so the loading warp fetches the next tile's
keys while the last tile's results are written: with few blocks per tile, writing costs most. The legend is the same.
H200, 8192 tokens, 32/8 heads of 128, block size 64, from the cache: 402 us here and 572 there with 16 local blocks and
a stride of 8, 195 and 249 with 4 and 16, 1415 and 1663 with all blocks; from the prompt's own keys 393 and 408.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.blocksparse.hopper_attend import attend_rows
from attention.kernels.blocksparse.hopper_load import load_tiles
from attention.kernels.blocksparse.pattern import LOG2E, KernelPattern
from attention.kernels.tma_rows import TmaRows, as_rows

# 128 keys and 2 stages take 482 us where these take 402.
_BLOCK_N = 64
_STAGES = 4
_CONSUMER_REGISTERS = 232
_LOADER_REGISTERS = 40
# Number of requests that one step of the search for a tile's request compares.
_SEARCHED = 128
_HEAD_SIZES = (64, 128)
# Rows of one copy.
_PIECES = (16, 32, 64, 128)


def launch(
    q_THD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    scale: float,
    pattern: KernelPattern,
    out: Tensor,
    num_sms: int,
    block_n: int = _BLOCK_N,
    stages: int = _STAGES,
) -> bool:
    """Launches the kernel. Returns False and launches nothing unless heads have 64 or 128 channels of 16 bits, in rows
    that the bulk copy engine can read.

    Args:
        block_table: None if all keys are in one block, where each request's keys start at the row of its first query.
    """
    num_tokens, num_heads, head_size = q_THD.shape
    block_size, num_kv_heads = k_BNHD.shape[1:3]
    piece = min(block_n, pattern.block_size, block_n if block_table is None else block_size)
    k_rows, v_rows = as_rows(k_BNHD), as_rows(v_BNHD)
    if (
        k_rows is None
        or v_rows is None
        or q_THD.dtype not in (torch.bfloat16, torch.float16)
        or q_THD.dtype != k_BNHD.dtype
        or head_size not in _HEAD_SIZES
        or piece not in _PIECES
        or (block_table is not None and block_size % piece)
    ):
        return False
    dtype = gl.bfloat16 if q_THD.dtype == torch.bfloat16 else gl.float16
    num_reqs = seq_lens.shape[0]
    # Two tiles more than full ones: a request's last tile may be partial, and its first need not begin with its first
    # token.
    num_tiles = num_tokens // 128 + 2 * num_reqs

    def descriptor(rows: TmaRows) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([piece, head_size], dtype)
        return TensorDescriptor.from_tensor(rows.rows, [piece, head_size], layout)

    _attend_kernel[(min(num_sms, num_tiles * num_heads),)](
        descriptor(k_rows),
        descriptor(v_rows),
        q_THD,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        scale * LOG2E,
        num_reqs,
        num_tiles,
        num_heads,
        block_size,
        *k_rows.places,
        *v_rows.places,
        0 if block_table is None else block_table.stride(0),
        *q_THD.stride()[:2],
        *out.stride()[:2],
        pattern.local_blocks,
        pattern.vert_stride,
        pattern.step,
        pattern.first_offset,
        HEADS_PER_OFFSET=pattern.heads_per_offset,
        GROUP=num_heads // num_kv_heads,
        SPARSE_BLOCK=pattern.block_size,
        HEAD_SIZE=head_size,
        BLOCK_N=block_n,
        PIECE=piece,
        STAGES=stages,
        SEARCHED=_SEARCHED,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        LOADER_REGISTERS=_LOADER_REGISTERS,
        num_warps=4,
    )
    return True


@gluon.jit(
    do_not_specialize=["num_reqs", "num_tiles", "local_blocks", "vert_stride", "step", "first_offset", "table_stride"],
    do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _attend_kernel(
    k_source,
    v_source,
    q_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    block_table_ptr,
    scale,
    num_reqs,
    num_tiles,
    num_heads,
    block_size,
    k_row_b,
    k_row_h,
    k_col_h,
    v_row_b,
    v_row_h,
    v_col_h,
    table_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    local_blocks,
    vert_stride,
    step,
    first_offset,
    HEADS_PER_OFFSET: gl.constexpr,
    GROUP: gl.constexpr,
    SPARSE_BLOCK: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PIECE: gl.constexpr,
    STAGES: gl.constexpr,
    SEARCHED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = k_source.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_SIZE], dtype)
    tiles_q = gl.allocate_shared_memory(dtype, [2, 64, HEAD_SIZE], layout)
    tiles_k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    tiles_v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], layout)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=2)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_v.index(stage), count=2)
    barriers = (full_k, empty_k, full_v, empty_v)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h)
    pattern = (local_blocks, vert_stride, step, first_offset)
    gl.warp_specialize(
        [
            (
                attend_rows,
                (
                    q_ptr, out_ptr, tiles_q, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, scale,
                    num_reqs, num_tiles, num_heads, strides, pattern,
                    0, HEADS_PER_OFFSET, SPARSE_BLOCK, PIECE, SEARCHED,
                ),
            ),
            (
                attend_rows,
                (
                    q_ptr, out_ptr, tiles_q, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, scale,
                    num_reqs, num_tiles, num_heads, strides, pattern,
                    1, HEADS_PER_OFFSET, SPARSE_BLOCK, PIECE, SEARCHED,
                ),
            ),
            (
                load_tiles,
                (
                    k_source, v_source, tiles_k, tiles_v, barriers, query_start_ptr, seq_lens_ptr, block_table_ptr,
                    num_reqs, num_tiles, num_heads, block_size, (k_row_b, k_row_h, k_col_h),
                    (v_row_b, v_row_h, v_col_h), table_stride, pattern, HEADS_PER_OFFSET, GROUP, SPARSE_BLOCK, PIECE,
                    SEARCHED,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip
