"""Block-sparse attention of prompts, in time proportional to the key blocks that a head sees. The twin is
`attention.blocksparse_mask`.

Legend: T tokens, H query heads, M queries of a tile, N keys of a tile,
D channels, R requests.

One program takes BLOCK_M consecutive positions of one head. The key blocks that any of them sees are numbered in this
order, and read BLOCK_N keys at a time as if they were adjacent:

    stripes before the local blocks | blocks that are local to any query, up to the diagonal

So no list of blocks is ever made, and only the ends of the local blocks need a mask.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attention.blocksparse import BlocksparseParams
from attention.kernels.blocksparse.pattern import LOG2E, KernelPattern, kernel_pattern
from attention.kernels.blocksparse.tile_ops import cached_rows, dot, load_rows, soften
from attention.kernels.tma_rows import as_rows
from baton.tritonlib.hopper_check import HopperKernels, has_hopper_kernels, probe_of
from baton.tritonlib.launch import bound, interpreted


@dataclass(frozen=True)
class PrefillTiling:
    """The tile sizes of the kernel. `block_n` is a multiple of the pattern's block size, or divides it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def prefill_tiling(head_size: int, dtype: torch.dtype, *, direct: bool) -> PrefillTiling:
    """Returns the tiling that fits the memories and keeps the tensor cores busiest. Two programs of 64 queries on a
    multiprocessor beat one of 128, because one multiplies while the other computes its softmax (H200, 8192 tokens at a
    density of 0.32: 408 us against 478; from the cache 572 against 610)."""
    if dtype == torch.float32:
        return PrefillTiling(128, 32, 8, 2) if head_size <= 128 else PrefillTiling(64, 32, 8, 1)
    if head_size > 128:
        return PrefillTiling(128, 64, num_warps=8, num_stages=2)
    return PrefillTiling(64, 64, num_warps=4, num_stages=3 if direct else 2)


def blocksparse_prefill(
    q_THD: Tensor,
    kv_layer: Tensor,
    *,
    k_THD: Tensor | None = None,
    v_THD: Tensor | None = None,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    params: BlocksparseParams | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor,
    hopper_sms: int | None = None,
    tiling: PrefillTiling | None = None,
) -> None:
    """Attends causally with each request's new tokens, which are its last; the context may have any length, including
    0.

    A request of length 0 is padding: nothing is read or written for it.

    Args:
        kv_layer: [2, B, N, H, D], any strides but a last one of 1; may be fp8.
        k_THD, v_THD: the new tokens' own keys and values, which are read instead of the cache's copies. That is faster,
            and correct only where no request has a context. See `can_read_directly`.
        query_start_loc: [R + 1] int32.
        params: the pattern; None attends to all blocks.
        k_scale, v_scale: of an fp8 cache; None: 1.
        hopper_sms: number of multiprocessors of a Hopper GPU; None on others.
        tiling: None takes the fastest.
    """
    pattern = kernel_pattern(params)
    keys, values = kv_layer.unbind(0)
    direct = k_THD is not None and v_THD is not None
    if k_THD is not None and v_THD is not None:
        keys, values = k_THD.unsqueeze(0), v_THD.unsqueeze(0)
    # Dense prompts that are read directly stay here: they take 1145 us, and 1348 us by the Hopper kernel (H200, 8192
    # tokens, 32/8 heads of 128).
    dense_and_direct = params is None and direct
    by_hopper = tiling is None and not dense_and_direct and has_hopper_kernels(q_THD.device, _HOPPER)
    if hopper_sms is not None and by_hopper:
        from attention.kernels.blocksparse import hopper as blocksparse_hopper

        launched = blocksparse_hopper.launch(
            q_THD,
            keys,
            values,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=None if direct else block_table,
            scale=scale,
            pattern=pattern,
            out=out,
            num_sms=hopper_sms,
        )
        if launched:
            return
    _launch(
        q_THD,
        keys,
        values,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        max_query_len=max_query_len,
        scale=scale,
        pattern=pattern,
        k_scale=k_scale,
        v_scale=v_scale,
        out=out,
        direct=direct,
        tiling=tiling or prefill_tiling(q_THD.shape[2], q_THD.dtype, direct=direct),
    )


_HOPPER = HopperKernels("block-sparse prompts", probe_of("attention.kernels.blocksparse.probe"))


def can_read_directly(kv_THD: Tensor, params: BlocksparseParams | None) -> bool:
    """Whether the bulk copy engine takes these keys or values, and blocks are large enough to be worth it."""
    return kernel_pattern(params).block_size >= 64 and as_rows(kv_THD.unsqueeze(0)) is not None


def _launch(
    q_THD: Tensor,
    k_BNHD: Tensor,
    v_BNHD: Tensor,
    *,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    scale: float,
    pattern: KernelPattern,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    direct: bool,
    tiling: PrefillTiling,
) -> None:
    num_heads, head_size = q_THD.shape[1:]
    block_channels = max(16, triton.next_power_of_2(head_size))
    block_n = min(tiling.block_n, pattern.block_size) if direct else tiling.block_n
    box = [block_n, 1, block_channels]
    # Tiles begin at multiples of block_m, but a context shifts the queries, which takes up to one more tile.
    num_tiles = triton.cdiv(max_query_len, tiling.block_m) + (0 if direct else 1)
    _prefill_kernel[(num_heads, num_tiles, seq_lens.shape[0])](
        q_THD,
        TensorDescriptor.from_tensor(k_BNHD[0], box) if direct else k_BNHD,
        TensorDescriptor.from_tensor(v_BNHD[0], box) if direct else v_BNHD,
        out,
        query_start_loc,
        seq_lens,
        block_table,
        k_scale,
        v_scale,
        scale * LOG2E,
        *q_THD.stride()[:2],
        *out.stride()[:2],
        block_table.stride(0),
        *k_BNHD.stride()[:3],
        *v_BNHD.stride()[:3],
        pattern.local_blocks,
        pattern.vert_stride,
        pattern.step,
        pattern.first_offset,
        HEADS_PER_OFFSET=pattern.heads_per_offset,
        GROUP=num_heads // k_BNHD.shape[2],
        SPARSE_BLOCK=pattern.block_size,
        CACHE_BLOCK=1 if direct else k_BNHD.shape[1],
        HEAD_SIZE=head_size,
        BLOCK_D=block_channels,
        BLOCK_M=tiling.block_m,
        BLOCK_N=block_n,
        DIRECT=direct,
        FP8=k_BNHD.dtype.itemsize == 1,
        INTERPRETED=interpreted(),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def key_at(place, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK: tl.constexpr):
    """Returns the positions of keys, given their places in the order of reading."""
    block = place // SPARSE_BLOCK
    block = tl.where(block < num_stripes, first_stripe + block * vert_stride, local_start + block - num_stripes)
    return block * SPARSE_BLOCK + place % SPARSE_BLOCK


@triton.jit
def sees(positions, keys, offset, local_blocks, vert_stride, SPARSE_BLOCK: tl.constexpr):
    """Returns [M, N], True where the pattern lets a query see a key."""
    query_blocks, key_blocks = positions // SPARSE_BLOCK, keys // SPARSE_BLOCK
    seen = query_blocks[:, None] - key_blocks[None, :] < local_blocks
    seen |= ((key_blocks + offset + 1) % vert_stride == 0)[None, :]
    return seen & (keys[None, :] <= positions[:, None])


@triton.jit(
    do_not_specialize=["local_blocks", "vert_stride", "step", "first_offset", "table_stride"],
    do_not_specialize_on_alignment=["query_start_loc_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    table_stride,
    k_stride_block,
    k_stride_token,
    k_stride_h,
    v_stride_block,
    v_stride_token,
    v_stride_h,
    local_blocks,
    vert_stride,
    step,
    first_offset,
    HEADS_PER_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIRECT: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    head, request = tl.program_id(0), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first, so that short ones fill the gaps at the end
    query_start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - query_start
    seq_len = tl.load(seq_lens_ptr + request)
    context_len = seq_len - query_len
    tile_start = (context_len // BLOCK_M + tile) * BLOCK_M
    if (query_len <= 0) | (context_len < 0) | (tile_start >= seq_len):
        return

    positions = tile_start + tl.arange(0, BLOCK_M)
    channels = tl.arange(0, BLOCK_D)
    in_head = channels < HEAD_SIZE
    is_query = (positions >= context_len) & (positions < seq_len)
    rows = (query_start - context_len + positions).to(tl.int64)
    q = tl.load(
        q_ptr + rows[:, None] * q_stride_t + head * q_stride_h + channels[None, :],
        mask=is_query[:, None] & in_head[None, :],
        other=0.0,
    )
    kv_head = head // GROUP
    pages_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    if not DIRECT:
        k_source += kv_head * k_stride_h
        v_source += kv_head * v_stride_h
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr)

    # Blocks [local_start, last_block] are local to some of the queries, from all_local on to all of them.
    offset = (first_offset + head // HEADS_PER_OFFSET) * step
    first_query = tl.maximum(tile_start, context_len)
    stop = tl.minimum(tile_start + BLOCK_M, seq_len)
    first_block, last_block = first_query // SPARSE_BLOCK, (stop - 1) // SPARSE_BLOCK
    local_start = tl.maximum(first_block - tl.maximum(local_blocks, 1) + 1, 0)
    all_local = tl.maximum(last_block - local_blocks + 1, local_start)
    first_stripe = vert_stride - 1 - offset % vert_stride
    num_stripes = tl.maximum(local_start - first_stripe + vert_stride - 1, 0) // vert_stride
    num_keys = (num_stripes - local_start) * SPARSE_BLOCK + stop
    num_tiles = num_keys // BLOCK_N
    first_local = num_stripes * SPARSE_BLOCK

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for index in tl.range(0, bound(num_tiles, INTERPRETED)):
        start = index * BLOCK_N
        if DIRECT:
            row = query_start + key_at(start, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
            k = k_source.load([row, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            scores = dot(q, k.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
            v = v_source.load([row, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            places = start + tl.arange(0, BLOCK_N)
            keys = key_at(places, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
            k_rows = cached_rows(k_source, keys, pages_ptr, k_stride_block, k_stride_token, CACHE_BLOCK)
            k = load_rows(k_rows, channels, None, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
            scores = dot(q, k.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
            v_rows = cached_rows(v_source, keys, pages_ptr, v_stride_block, v_stride_token, CACHE_BLOCK)
            v = load_rows(v_rows, channels, None, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
        local_key = local_start * SPARSE_BLOCK + start - first_local
        not_all_local = (start + BLOCK_N > first_local) & (local_key < all_local * SPARSE_BLOCK)
        if not_all_local | (local_key + BLOCK_N > first_query + 1):
            places = start + tl.arange(0, BLOCK_N)
            keys = key_at(places, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
            seen = sees(positions, keys, offset, local_blocks, vert_stride, SPARSE_BLOCK)
            scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, m, total = soften(scores, scale, m, total)
        acc = dot(weights.to(q.dtype), v, acc * shrink[:, None], INTERPRETED)

    if num_tiles * BLOCK_N < num_keys:
        # The last keys of a request: the memory after them may hold NaN.
        places = num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = places < num_keys
        keys = key_at(places, first_stripe, num_stripes, vert_stride, local_start, SPARSE_BLOCK)
        if DIRECT:
            row = query_start + tl.min(keys, 0)
            k = k_source.load([row, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            v = tl.where(exists[:, None], v_source.load([row, kv_head, 0]).reshape(BLOCK_N, BLOCK_D), 0.0)
        else:
            keys = tl.where(exists, keys, 0)
            k_rows = cached_rows(k_source, keys, pages_ptr, k_stride_block, k_stride_token, CACHE_BLOCK)
            v_rows = cached_rows(v_source, keys, pages_ptr, v_stride_block, v_stride_token, CACHE_BLOCK)
            k = load_rows(k_rows, channels, exists, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
            v = load_rows(v_rows, channels, exists, HEAD_SIZE, q.dtype, FP8, INTERPRETED)
        scores = dot(q, k.T, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
        seen = sees(positions, keys, offset, local_blocks, vert_stride, SPARSE_BLOCK) & exists[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        weights, shrink, m, total = soften(scores, scale, m, total)
        acc = dot(weights.to(q.dtype), v, acc * shrink[:, None], INTERPRETED)

    acc /= tl.where(total == 0.0, 1.0, total)[:, None]  # 0 where no key was seen
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr)
    tl.store(
        out_ptr + rows[:, None] * out_stride_t + head * out_stride_h + channels[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_query[:, None] & in_head[None, :],
    )
