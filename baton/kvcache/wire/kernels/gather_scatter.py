"""Moves a request's tokens between the paged cache and wire order [layer, k/v, token, head, channel]. The twins are the
CPU halves of `gather_to_wire` and `scatter_from_wire`.

The payload is cut into rows, pieces of one token's adjacent bytes, all of one size. A program takes consecutive rows,
computes where each lies in the cache, and moves them. So the payload is one stream for every layout, and a gathered
tile is whole rows of the digest's matrix: the digest costs only additions.

Legend: R rows, W words of a row.
"""

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kvcache.wire.kernels import digest
from baton.kvcache.wire.kernels.rows import Cut, cut_rows
from baton.kvcache.wire.places import WirePlaces
from baton.tritonlib.launch import PreparedKernel

# The most words in a row, the words that a program moves at a time, and its warps.
_TUNING = (512, 2048, 1)
# With a digest: few programs with many tiles each, because each program writes a row of column sums.
_DIGEST_TUNING = (512, 8192, 8)


def move(
    memory: Tensor,
    payload: Tensor,
    block_ids: Tensor,
    places: WirePlaces,
    *,
    to_cache: bool,
    tuning: tuple[int, int, int] = _TUNING,
) -> None:
    """Moves a payload out of the cache, or into it.

    Blocks outside of the cache are neither read nor written; a payload has zeros in their place.

    Args:
        memory, payload: contiguous uint8; the whole cache's memory.
        block_ids: int64, of the whole request.
    """
    row_words, tile_words, num_warps = tuning
    cut = cut_rows(places, places.word_bytes(memory, payload), row_words, tile_words)
    _move_kernel[(cut.num_tiles,)](
        memory, payload, block_ids, *cut.arguments, **cut.constants, TO_CACHE=to_cache, num_warps=num_warps
    )


def gather_and_digest(
    memory: Tensor,
    payload: Tensor,
    block_ids: Tensor,
    places: WirePlaces,
    *,
    columns: int,
    constant_term: int,
    digest_out: Tensor,
    tuning: tuple[int, int, int] = _DIGEST_TUNING,
) -> None:
    """Moves a payload out of the cache and writes its digest into `digest_out`, an int64 scalar; the other arguments
    are those of `move` and of `digest_payload`.

    Requires `WirePlaces.can_be_digested`.
    """
    assert places.can_be_digested(memory, payload)
    row_words, tile_words, num_warps = tuning
    cut = cut_rows(places, 4, row_words, tile_words)
    digest_rows = triton.cdiv(payload.numel(), 4 * columns)
    num_programs = digest.programs_for(digest_rows, digest.programs_at_once(payload.device))
    _gather_and_digest_kernel[(num_programs,)](
        memory,
        payload,
        block_ids,
        digest.new_scratch(columns, payload.device),
        digest_out,
        constant_term,
        *cut.arguments,
        **cut.constants,
        COLUMNS=columns,
        **digest.CONSTANTS,
        num_warps=num_warps,
    )


def prepare_move(places: WirePlaces, device: torch.device, *, to_cache: bool) -> PreparedKernel:
    """Prepares `move` for all payloads that differ from these places only in layers, tokens and the first head.

    A launch has as many programs as the cut has tiles. Its arguments: memory, payload, block ids, the cut's arguments.
    """
    constants = {**cut_to_move(places).constants, "TO_CACHE": to_cache}
    examples = (torch.uint8, torch.uint8, torch.int64, *_EXAMPLES)
    return PreparedKernel(_move_kernel, device, examples, constants, num_warps=_TUNING[2])


def prepare_gather_and_digest(places: WirePlaces, device: torch.device, *, columns: int) -> PreparedKernel:
    """Prepares `gather_and_digest` for the same payloads.

    A launch has `digest.programs_for` programs. Its arguments: memory, payload, block ids, scratch, digest, constant
    term, the cut's arguments.
    """
    constants = {**cut_to_digest(places).constants, "COLUMNS": columns, **digest.CONSTANTS}
    examples = (torch.uint8, torch.uint8, torch.int64, torch.int32, torch.uint8, 1, *_EXAMPLES)
    return PreparedKernel(_gather_and_digest_kernel, device, examples, constants, num_warps=_DIGEST_TUNING[2])


# Examples of a cut's arguments: any numbers.
_EXAMPLES = (1,) * 10


def cut_to_move(places: WirePlaces) -> Cut:
    """The cut of `prepare_move`."""
    return cut_rows(places, gcd(4, places.unit_bytes), *_TUNING[:2])


def cut_to_digest(places: WirePlaces) -> Cut:
    """The cut of `prepare_gather_and_digest`."""
    return cut_rows(places, 4, *_DIGEST_TUNING[:2])


# Not specialised, so that a kernel is compiled for a cache's shape, not for each payload's. `first` and the strides
# are counted in UNIT.
NUMBERS = [
    "num_rows",
    "rows_of_part",
    "token_start",
    "num_blocks",
    "first",
    "stride_L",
    "stride_K",
    "stride_B",
    "stride_N",
    "stride_H",
]


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["block_ids_ptr"])
def _move_kernel(
    cache_ptr,
    payload_ptr,
    block_ids_ptr,
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
    TO_CACHE: tl.constexpr,
):
    word: tl.constexpr = tl.int32 if WORD_BYTES == 4 else (tl.int16 if WORD_BYTES == 2 else tl.int8)
    words_W = tl.arange(0, WORDS)
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places_R, in_cache_R = locate(
        tl.program_id(0),
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
    cache_ptrs_RW = cache_ptr.to(tl.pointer_type(word)) + first * UNIT + places_R[:, None] + words_W[None, :]
    payload_ptrs_RW = payload_ptr.to(tl.pointer_type(word)) + rows_R[:, None] * WORDS + words_W[None, :]
    if TO_CACHE:
        tl.store(cache_ptrs_RW, tl.load(payload_ptrs_RW, mask=in_cache_R[:, None]), mask=in_cache_R[:, None])
    else:
        tile_RW = tl.load(cache_ptrs_RW, mask=in_cache_R[:, None], other=0)
        tl.store(payload_ptrs_RW, tile_RW, mask=(rows_R < num_rows)[:, None])


@triton.jit(
    do_not_specialize=["constant_term", *NUMBERS], do_not_specialize_on_alignment=["block_ids_ptr", "digest_ptr"]
)
def _gather_and_digest_kernel(
    cache_ptr,
    payload_ptr,
    block_ids_ptr,
    scratch_ptr,
    digest_ptr,
    constant_term: tl.int64,
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
    COLUMNS: tl.constexpr,
    HELD_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_GROUPS: tl.constexpr,
):
    tl.static_assert(WORD_BYTES == 4)
    cache_ptr = cache_ptr.to(tl.pointer_type(tl.int32)) + first * UNIT
    payload_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
    # Payload rows in one row of the digest's matrix.
    PER_ROW: tl.constexpr = COLUMNS // WORDS
    DIGEST_ROWS: tl.constexpr = ROWS // PER_ROW
    of_columns = tl.zeros([PER_ROW, WORDS], tl.int32)
    of_rows_D = tl.zeros([HELD_ROWS], tl.int64)
    own_ptr = digest.own_memory(scratch_ptr, COLUMNS, MOST_GROUPS)
    words_W = tl.arange(0, WORDS)
    num_tiles = tl.cdiv(num_rows, ROWS)
    tile = tl.program_id(0)
    while tile < num_tiles:
        first_tile = tile
        held = 0
        while tile < digest.held_until(first_tile, num_tiles, DIGEST_ROWS, HELD_ROWS):
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
            rows_R = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            tile_RW = tl.load(cache_ptr + places_R[:, None] + words_W[None, :], mask=in_cache_R[:, None], other=0)
            payload_ptrs_RW = payload_ptr + rows_R[:, None] * WORDS + words_W[None, :]
            tl.store(payload_ptrs_RW, tile_RW, mask=(rows_R < num_rows)[:, None])
            of_columns += tl.sum(tl.reshape(tile_RW, [DIGEST_ROWS, PER_ROW, WORDS]), axis=0)
            sums_D = tl.sum(tl.reshape(tile_RW, [DIGEST_ROWS, COLUMNS]), axis=1)
            held = digest.hold(sums_D, own_ptr, held, DIGEST_ROWS)
            tile += tl.num_programs(0)
        of_rows_D += digest.weigh(own_ptr, held, first_tile, DIGEST_ROWS, HELD_ROWS)
    columns = tl.arange(0, PER_ROW)[:, None] * WORDS + words_W[None, :]
    digest.finish(of_columns, columns, of_rows_D, constant_term, scratch_ptr, digest_ptr, COLUMNS, GROUP, MOST_GROUPS)


@triton.jit
def locate(
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
    KV_FACTOR: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Locates each row of a tile: its place, in words from the cache's first, and whether it lies in the cache."""
    first_row = tile.to(tl.int64) * ROWS
    # The 64-bit division once per tile; rows count from the tile's part.
    rows_R = (first_row % rows_of_part).to(tl.int32) + tl.arange(0, ROWS)
    parts_R = (first_row // rows_of_part).to(tl.int32) + rows_R // rows_of_part
    rows_R = rows_R % rows_of_part
    heads_R = rows_R // PIECES % NUM_HEADS
    tokens_R = rows_R // (PIECES * NUM_HEADS) + token_start
    in_payload_R = first_row + tl.arange(0, ROWS) < num_rows
    blocks_R = tl.load(block_ids_ptr + tokens_R // BLOCK_SIZE, mask=in_payload_R, other=-1)
    units_R = (
        (parts_R // KV_FACTOR).to(tl.int64) * stride_L
        + (parts_R % KV_FACTOR).to(tl.int64) * stride_K
        + blocks_R * stride_B
        + (tokens_R % BLOCK_SIZE) * stride_N
        + heads_R * stride_H
    )
    return units_R * UNIT + rows_R % PIECES * WORDS, (blocks_R >= 0) & (blocks_R < num_blocks)
