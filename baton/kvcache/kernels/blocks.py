"""Copies whole blocks and converts a layer to another dtype. The twins are the CPU halves of `baton.kvcache.block_ops`.

Legend: O axes outside of the block axis in memory (layers times keys and values, or none), B blocks, X contiguous bytes
of a block, P pairs, R rows, N H C token in a block, head, channel.
"""

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from baton.tritonlib.fp8 import from_fp8, scale_of, to_fp8
from baton.tritonlib.launch import interpreted

_TILE_WORDS = 4096
_NUM_WARPS = 4
# Elements that one program converts, and the most in a row.
_TILE_ELEMENTS = 4096
_ROW_ELEMENTS = 1024


def copy(source_OBX: Tensor, target_OBX: Tensor, pairs_P2: Tensor, *, num_programs: int | None = None) -> None:
    """Copies blocks: for each pair, the source's first block to the target's second.

    Args:
        source_OBX, target_OBX: uint8; on a GPU, or one of them in page-locked memory of the CPU.
        pairs_P2: int64, on the GPU; no block is written twice, or both read and written.
        num_programs: programs that share the work. Few leave multiprocessors to other kernels; None: one per tile.
    """
    num_outside, _, block_bytes = source_OBX.shape
    strides = (source_OBX.stride(0), source_OBX.stride(1), target_OBX.stride(0), target_OBX.stride(1))
    word = gcd(4, block_bytes, *strides, source_OBX.data_ptr(), target_OBX.data_ptr())
    tiles_of_block = triton.cdiv(block_bytes // word, _TILE_WORDS)
    num_tiles = pairs_P2.shape[0] * num_outside * tiles_of_block
    _copy_kernel[(min(num_programs or num_tiles, num_tiles),)](
        source_OBX,
        target_OBX,
        pairs_P2,
        num_tiles,
        tiles_of_block,
        num_outside,
        block_bytes // word,
        *(stride // word for stride in strides),
        WORD_BYTES=word,
        WORDS=_TILE_WORDS,
        num_warps=_NUM_WARPS,
    )


def convert(
    source_KBNHC: Tensor, target_KBNHC: Tensor, *, scale: Tensor | None = None, v_scale: Tensor | None = None
) -> None:
    """Writes one layer's numbers into another of the same shape and any strides, in the target's dtype.

    Args:
        scale, v_scale: float32 scalars of the fp8 side for k = 0 and k = 1; None is 1.
    """
    num_k, num_blocks, block_size, num_heads, channels = source_KBNHC.shape
    row = min(channels & -channels, _ROW_ELEMENTS)
    rows_of_block = block_size * num_heads * (channels // row)
    grid = (num_blocks, triton.cdiv(rows_of_block, _TILE_ELEMENTS // row), num_k)
    _convert_kernel[grid](
        source_KBNHC,
        target_KBNHC,
        scale,
        v_scale,
        rows_of_block,
        *source_KBNHC.stride()[:4],
        *target_KBNHC.stride()[:4],
        NUM_HEADS=num_heads,
        PIECES=channels // row,
        ROWS=_TILE_ELEMENTS // row,
        ELEMENTS=row,
        INTERPRETED=interpreted(),
        num_warps=_NUM_WARPS,
    )


@triton.jit(do_not_specialize=["num_tiles", "tiles_of_block", "num_outside"])
def _copy_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    num_tiles,
    tiles_of_block,
    num_outside,
    words_of_block,
    source_stride_O,
    source_stride_B,
    target_stride_O,
    target_stride_B,
    WORD_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
):
    word: tl.constexpr = tl.int32 if WORD_BYTES == 4 else (tl.int16 if WORD_BYTES == 2 else tl.int8)
    source_ptr = source_ptr.to(tl.pointer_type(word))
    target_ptr = target_ptr.to(tl.pointer_type(word))
    tile = tl.program_id(0)
    while tile < num_tiles:
        words_W = tile % tiles_of_block * WORDS + tl.arange(0, WORDS)
        outside = (tile // tiles_of_block % num_outside).to(tl.int64)
        pair_ptr = pairs_ptr + tile // (tiles_of_block * num_outside) * 2
        source = outside * source_stride_O + tl.load(pair_ptr) * source_stride_B
        target = outside * target_stride_O + tl.load(pair_ptr + 1) * target_stride_B
        moved_W = words_W < words_of_block
        tl.store(target_ptr + target + words_W, tl.load(source_ptr + source + words_W, mask=moved_W), mask=moved_W)
        tile += tl.num_programs(0)


@triton.jit
def _convert_kernel(
    source_ptr,
    target_ptr,
    scale_ptr,
    v_scale_ptr,
    rows_of_block,
    source_stride_K,
    source_stride_B,
    source_stride_N,
    source_stride_H,
    target_stride_K,
    target_stride_B,
    target_stride_N,
    target_stride_H,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    k = tl.program_id(2).to(tl.int64)
    rows_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    offsets_R = rows_R // (NUM_HEADS * PIECES)
    heads_R = rows_R // PIECES % NUM_HEADS
    in_head_RE = (rows_R % PIECES * ELEMENTS)[:, None] + tl.arange(0, ELEMENTS)[None, :]
    source_R = k * source_stride_K + block * source_stride_B + offsets_R * source_stride_N + heads_R * source_stride_H
    target_R = k * target_stride_K + block * target_stride_B + offsets_R * target_stride_N + heads_R * target_stride_H
    converted_R1 = (rows_R < rows_of_block)[:, None]
    values_RE = tl.load(source_ptr + source_R[:, None] + in_head_RE, mask=converted_R1)
    stored: tl.constexpr = source_ptr.dtype.element_ty
    dtype: tl.constexpr = target_ptr.dtype.element_ty
    from_8_bits: tl.constexpr = stored == tl.float8e4nv or stored == tl.float8e5
    to_8_bits: tl.constexpr = dtype == tl.float8e4nv or dtype == tl.float8e5
    scale = scale_of(k, scale_ptr, v_scale_ptr)
    values_RE = from_fp8(values_RE, INTERPRETED) if from_8_bits else values_RE.to(tl.float32)
    # Both sides in 8 bits have the same scale.
    if from_8_bits and not to_8_bits:
        values_RE *= scale
    if to_8_bits and not from_8_bits:
        values_RE = tl.div_rn(values_RE, scale)
    converted_RE = to_fp8(values_RE, dtype, INTERPRETED) if to_8_bits else values_RE.to(dtype)
    tl.store(target_ptr + target_R[:, None] + in_head_RE, converted_RE, mask=converted_R1)
