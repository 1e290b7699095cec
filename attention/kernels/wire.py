"""A request's tokens between the paged cache and wire order [layer, k/v, token, head, channel]; the twins are the CPU's
halves of `gather_to_wire` and `scatter_from_wire`.

The payload is cut into rows, pieces of one token's adjacent bytes, all of one size; a program takes consecutive rows,
works out where each lies in the cache, and moves them. So the payload's side is one stream whatever the layout, and a
gathered tile is whole rows of the digest's matrix, which is why the digest costs additions only.

Legend: R rows, W words of a row.
"""

from dataclasses import dataclass
from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from attention.kernels.digest import leave_columns, leave_rows, new_parts


@dataclass(frozen=True)
class WirePlaces:
    """Where a payload's runs lie in a cache; all sizes and strides in bytes.

    Attributes:
        first: of the first layer, head and block.
        run: bytes that are adjacent on both sides: of one head of a token, or of all of them where `num_heads` is 1.
        stride_L, stride_K, stride_B, stride_N, stride_H: from one to the next in the cache.
        num_parts, kv_factor: layers times keys and values, and how many of these a layer has.
        num_tokens, num_heads: runs of a part.
        token_start: the request's first token.
        block_size, num_blocks: of the cache.
    """

    first: int
    run: int
    stride_L: int
    stride_K: int
    stride_B: int
    stride_N: int
    stride_H: int
    num_parts: int
    kv_factor: int
    num_tokens: int
    num_heads: int
    token_start: int
    block_size: int
    num_blocks: int

    def word_bytes(self, *memories: Tensor) -> int:
        """The widest word, of at most 4 bytes, in which sizes and addresses can be counted."""
        sizes = (self.first, self.run, self.stride_L, self.stride_K, self.stride_B, self.stride_N, self.stride_H)
        addresses = (memory.data_ptr() for memory in memories)
        return gcd(4, *sizes, *addresses)

    def can_be_digested(self, *memories: Tensor) -> bool:
        """Whether `gather_and_digest` takes them: all counted in words of 4 bytes, and runs of an even number of words.

        NOTE: not of rows of one word, for some of which the compiler of Triton 3.6 aborts the process (an assertion in
        LLVM's SLPVectorizer).
        """
        return self.word_bytes(*memories) == 4 and self.run % 8 == 0


# Words of a row at most, words that a program moves at a time, and its warps.
_TUNING = (512, 2048, 1)
# With a digest few programs of many tiles each, because each leaves a row of column sums.
_DIGEST_TUNING = (512, 8192, 8)
_DIGEST_PROGRAMS_PER_SM = 2


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
    length_term: int,
    digest_out: Tensor,
    tuning: tuple[int, int, int] = _DIGEST_TUNING,
) -> None:
    """Moves a payload out of the cache and writes its digest into `digest_out`, an int64 scalar; the other arguments
    are those of `move` and of `digest_payload`.

    Only where `WirePlaces.can_be_digested`.
    """
    assert places.can_be_digested(memory, payload)
    row_words, tile_words, num_warps = tuning
    cut = cut_rows(places, 4, row_words, tile_words)
    digest_rows = triton.cdiv(payload.numel(), 4 * columns)
    parts = new_parts(digest_rows, columns, payload.device, programs_per_sm=_DIGEST_PROGRAMS_PER_SM)
    _gather_and_digest_kernel[(parts.num_programs,)](
        memory,
        payload,
        block_ids,
        *cut.arguments,
        parts.columns,
        parts.rows,
        digest_out,
        length_term,
        cut.num_tiles,
        digest_rows,
        **cut.constants,
        COLUMNS=columns,
        num_warps=num_warps,
    )
    parts.finish(digest_out)


@dataclass(frozen=True)
class Cut:
    """A payload cut into tiles of rows: what a kernel is told of it."""

    num_tiles: int
    arguments: tuple[int, ...]
    constants: dict[str, int]


def cut_rows(places: WirePlaces, word_bytes: int, row_words: int, tile_words: int) -> Cut:
    run = places.run // word_bytes
    row = min(run & -run, row_words)
    tile_rows = max(1, tile_words // row)
    rows_of_part = places.num_tokens * places.num_heads * (run // row)
    num_rows = rows_of_part * places.num_parts
    lengths = (places.first, places.stride_L, places.stride_K, places.stride_B, places.stride_N, places.stride_H)
    return Cut(
        num_tiles=triton.cdiv(num_rows, tile_rows),
        arguments=(
            num_rows,
            rows_of_part,
            places.token_start,
            places.num_blocks,
            *(length // word_bytes for length in lengths),
        ),
        constants={
            "KV_FACTOR": places.kv_factor,
            "NUM_HEADS": places.num_heads,
            "PIECES": run // row,
            "BLOCK_SIZE": places.block_size,
            "WORD_BYTES": word_bytes,
            "ROWS": tile_rows,
            "WORDS": row,
        },
    )


@triton.jit(do_not_specialize=["num_rows", "rows_of_part", "token_start", "num_blocks"])
def _move_kernel(
    cache_ptr,
    payload_ptr,
    block_ids_ptr,
    num_rows,
    rows_of_part,
    token_start,
    num_blocks,
    first,
    stride_L,
    stride_K,
    stride_B,
    stride_N,
    stride_H,
    KV_FACTOR: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
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
        ROWS,
        WORDS,
    )
    cache_ptrs_RW = cache_ptr.to(tl.pointer_type(word)) + first + places_R[:, None] + words_W[None, :]
    payload_ptrs_RW = payload_ptr.to(tl.pointer_type(word)) + rows_R[:, None] * WORDS + words_W[None, :]
    if TO_CACHE:
        tl.store(cache_ptrs_RW, tl.load(payload_ptrs_RW, mask=in_cache_R[:, None]), mask=in_cache_R[:, None])
    else:
        tile_RW = tl.load(cache_ptrs_RW, mask=in_cache_R[:, None], other=0)
        tl.store(payload_ptrs_RW, tile_RW, mask=(rows_R < num_rows)[:, None])


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "rows_of_part",
        "token_start",
        "num_blocks",
        "length_term",
        "num_tiles",
        "num_digest_rows",
    ]
)
def _gather_and_digest_kernel(
    cache_ptr,
    payload_ptr,
    block_ids_ptr,
    num_rows,
    rows_of_part,
    token_start,
    num_blocks,
    first,
    stride_L,
    stride_K,
    stride_B,
    stride_N,
    stride_H,
    of_columns_ptr,
    of_rows_ptr,
    digest_ptr,
    length_term,
    num_tiles,
    num_digest_rows,
    KV_FACTOR: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tl.static_assert(WORD_BYTES == 4)
    cache_ptr = cache_ptr.to(tl.pointer_type(tl.int32)) + first
    payload_ptr = payload_ptr.to(tl.pointer_type(tl.int32))
    # A row of the digest's matrix is as many rows of ours.
    PER_ROW: tl.constexpr = COLUMNS // WORDS
    DIGEST_ROWS: tl.constexpr = ROWS // PER_ROW
    of_columns = tl.zeros([PER_ROW, WORDS], tl.int32)
    words_W = tl.arange(0, WORDS)
    tile = tl.program_id(0)
    while tile < num_tiles:
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
            ROWS,
            WORDS,
        )
        rows_R = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tile_RW = tl.load(cache_ptr + places_R[:, None] + words_W[None, :], mask=in_cache_R[:, None], other=0)
        payload_ptrs_RW = payload_ptr + rows_R[:, None] * WORDS + words_W[None, :]
        tl.store(payload_ptrs_RW, tile_RW, mask=(rows_R < num_rows)[:, None])
        of_columns += tl.sum(tl.reshape(tile_RW, [DIGEST_ROWS, PER_ROW, WORDS]), axis=0)
        sums_D = tl.sum(tl.reshape(tile_RW, [DIGEST_ROWS, COLUMNS]), axis=1)
        leave_rows(sums_D, tile.to(tl.int64) * DIGEST_ROWS, num_digest_rows, of_rows_ptr, DIGEST_ROWS)
        tile += tl.num_programs(0)
    columns = tl.arange(0, PER_ROW)[:, None] * WORDS + words_W[None, :]
    leave_columns(of_columns, columns, length_term, of_columns_ptr, digest_ptr, COLUMNS)


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
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Where each row of a tile lies in the cache, in words, and whether it lies there at all."""
    first_row = tile.to(tl.int64) * ROWS
    # The 64-bit division once per tile; rows count from the tile's part.
    rows_R = (first_row % rows_of_part).to(tl.int32) + tl.arange(0, ROWS)
    parts_R = (first_row // rows_of_part).to(tl.int32) + rows_R // rows_of_part
    rows_R = rows_R % rows_of_part
    heads_R = rows_R // PIECES % NUM_HEADS
    tokens_R = rows_R // (PIECES * NUM_HEADS) + token_start
    in_payload_R = first_row + tl.arange(0, ROWS) < num_rows
    blocks_R = tl.load(block_ids_ptr + tokens_R // BLOCK_SIZE, mask=in_payload_R, other=-1)
    places_R = (
        (parts_R // KV_FACTOR).to(tl.int64) * stride_L
        + (parts_R % KV_FACTOR).to(tl.int64) * stride_K
        + blocks_R * stride_B
        + (tokens_R % BLOCK_SIZE) * stride_N
        + heads_R * stride_H
        + rows_R % PIECES * WORDS
    )
    return places_R, (blocks_R >= 0) & (blocks_R < num_blocks)
