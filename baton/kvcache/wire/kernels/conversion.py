"""Gathers a request's tokens from the paged cache in wire order, in another dtype. The twin is the CPU half of
`baton.kvcache.wire.conversion`.

Each number is read once and written once. Rows are as in `baton.kvcache.wire.kernels.gather_scatter`, but hold numbers
instead of words.

Legend: R rows, W numbers of a row, L layers, K key and value.
"""

import triton
import triton.language as tl
from torch import Tensor

from baton.kvcache.wire.kernels.gather_scatter import NUMBERS, locate
from baton.kvcache.wire.kernels.rows import cut_rows
from baton.kvcache.wire.places import WirePlaces
from baton.tritonlib.fp8 import to_fp8
from baton.tritonlib.launch import interpreted
from baton.tritonlib.rounding import round_to

# The most numbers in a row, the numbers that a program converts, and its warps.
_TUNING = (512, 2048, 1)


def gather_converted(
    numbers: Tensor,
    payload: Tensor,
    block_ids: Tensor,
    places: WirePlaces,
    *,
    scales_LK: Tensor | None,
    tuning: tuple[int, int, int] = _TUNING,
) -> None:
    """Copies a payload out of the cache, in the payload's dtype.

    Blocks outside of the cache are not read; the payload has zeros in their place.

    Args:
        numbers: the whole cache, [numbers], float32, bfloat16 or float16.
        payload: [numbers], adjacent, in any dtype of a cache.
        block_ids: int64, of the whole request.
        scales_LK: float32, for the layers of `places` and a payload in 8 bits: numbers are divided by it. None is 1.
    """
    row_numbers, tile_numbers, num_warps = tuning
    cut = cut_rows(places, numbers.element_size(), row_numbers, tile_numbers)
    _gather_converted_kernel[(cut.num_tiles,)](
        numbers,
        payload,
        block_ids,
        scales_LK,
        0 if scales_LK is None else scales_LK.stride(0),
        *cut.arguments,
        **cut.constants,
        INTERPRETED=interpreted(),
        num_warps=num_warps,
    )


@triton.jit(
    do_not_specialize=["scale_stride_L", *NUMBERS], do_not_specialize_on_alignment=["block_ids_ptr", "scales_ptr"]
)
def _gather_converted_kernel(
    cache_ptr,
    payload_ptr,
    block_ids_ptr,
    scales_ptr,
    scale_stride_L,
    num_rows: tl.int64,
    rows_of_part: tl.int32,
    token_start: tl.int32,
    num_blocks: tl.int64,
    first: tl.int64,
    stride_L: tl.int64,
    stride_K: tl.int64,
    stride_B: tl.int64,
    stride_N: tl.int32,
    stride_H: tl.int32,
    KV_FACTOR: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    tl.static_assert(cache_ptr.dtype.element_ty.primitive_bitwidth == 8 * WORD_BYTES)
    dtype: tl.constexpr = payload_ptr.dtype.element_ty
    tile = tl.program_id(0)
    places_R, in_cache_R = locate(
        tile,
        block_ids_ptr,
        num_rows,
        rows_of_part,
        token_start,
        num_blocks,
        stride_L,
        stride_K,
        stride_B,
        stride_N,
        stride_H,
        KV_FACTOR,
        NUM_HEADS,
        PIECES,
        BLOCK_SIZE,
        UNIT,
        ROWS,
        WORDS,
    )
    words_W = tl.arange(0, WORDS)
    rows_R = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_payload_R = rows_R < num_rows
    cache_ptrs_RW = cache_ptr + first * UNIT + places_R[:, None] + words_W[None, :]
    values_RW = tl.load(cache_ptrs_RW, mask=in_cache_R[:, None], other=0.0).to(tl.float32)
    if dtype == tl.float8e4nv or dtype == tl.float8e5:
        if scales_ptr is not None:
            parts_R = (rows_R // rows_of_part).to(tl.int32)
            scale_ptrs_R = scales_ptr + parts_R // KV_FACTOR * scale_stride_L + parts_R % KV_FACTOR
            scales_R = tl.load(scale_ptrs_R, mask=in_payload_R, other=1.0)
            values_RW = tl.div_rn(values_RW, scales_R[:, None])
        converted_RW = to_fp8(values_RW, dtype, INTERPRETED)
    else:
        converted_RW = round_to(values_RW, dtype, INTERPRETED)
    tl.store(payload_ptr + rows_R[:, None] * WORDS + words_W[None, :], converted_RW, mask=in_payload_R[:, None])
