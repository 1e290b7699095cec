"""The operands of a grouped product, tile by tile, and one step of its sum.

Legend: M row of a tile, N output channel, K input channel, P piece of a row.
"""

import triton
import triton.language as tl

# Channels of a row that one instruction fetches.
_PIECE = tl.constexpr(256)


@triton.jit
def prefetch_rows(row_ptrs_N, channels: tl.constexpr, PREFETCHED: tl.constexpr):
    """Loads PREFETCHED channels of rows, a power of two, into L2. Rows begin at multiples of 16 bytes and have a
    multiple of 16 bytes. Not for the interpreter."""
    PIECE: tl.constexpr = PREFETCHED if PREFETCHED < _PIECE else _PIECE
    columns_P = tl.minimum(tl.arange(0, PREFETCHED // PIECE), (channels - 1) // PIECE) * PIECE
    bytes_P = tl.minimum(channels - columns_P, PIECE) * (row_ptrs_N.dtype.element_ty.primitive_bitwidth // 8)
    ptrs_NP = row_ptrs_N[:, None] + columns_P[None, :]
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0 is not used",
        "=r,l,r",
        [ptrs_NP.to(tl.int64), tl.broadcast_to(bytes_P[None, :], ptrs_NP.shape)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def inputs(x_ptrs_M, exists_M, start, IN: tl.constexpr, BLOCK_K: tl.constexpr):
    channels_K = start + tl.arange(0, BLOCK_K)
    mask_MK = exists_M[:, None]
    if IN % BLOCK_K:
        mask_MK = mask_MK & (channels_K < IN)[None, :]
    return tl.trans(tl.load(x_ptrs_M[:, None] + channels_K[None, :], mask=mask_MK, other=0.0))


@triton.jit
def weight_tile(
    weights,
    weights_map,
    expert,
    row,
    column,
    stride_N,
    stride_K,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    INPUTS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Loads a tile of an expert's weights, 0 past their end. The map describes [E,N,K], or [E,K,N] with
    INPUTS_FIRST."""
    if weights_map is not None:
        if INPUTS_FIRST:
            tile_NK = tl.trans(tl.reshape(weights_map.load([expert, column, row]), [BLOCK_K, BLOCK_N]))
        else:
            tile_NK = tl.reshape(weights_map.load([expert, row, column]), [BLOCK_N, BLOCK_K])
    else:
        rows_N = row + tl.arange(0, BLOCK_N)
        columns_K = column + tl.arange(0, BLOCK_K)
        ptrs_NK = weights + rows_N[:, None] * stride_N + columns_K[None, :] * stride_K
        tile_NK = tl.load(ptrs_NK, mask=(rows_N < OUT)[:, None] & (columns_K < IN)[None, :], other=0.0)
    return tile_NK


@triton.jit
def add_product(
    sum_NM, tile_NK, x_KM, scales, start, SCALE_K: tl.constexpr, SCALE_COLUMNS: tl.constexpr, INTERPRETED: tl.constexpr
):
    if INTERPRETED:
        tile_NK = tile_NK.to(tl.float32)
        x_KM = x_KM.to(tl.float32)
    else:
        tile_NK = tile_NK.to(x_KM.dtype)
    if scales is not None and SCALE_COLUMNS > 1:
        part_NM = tl.dot(tile_NK, x_KM, input_precision="ieee")
        sum_NM += part_NM * tl.load(scales + start // SCALE_K)
    else:
        sum_NM = tl.dot(tile_NK, x_KM, sum_NM, input_precision="ieee")
    return sum_NM


@triton.jit
def bias_of(bias, channels_N, OUT: tl.constexpr):
    return tl.load(bias + channels_N, mask=channels_N < OUT, other=0.0).to(tl.float32)[:, None]
