"""Where a payload's runs lie in a cache, and how kernels cut it into rows: pieces of one token's adjacent bytes, all of
one size. Plain numbers; launches nothing.
"""

from dataclasses import dataclass
from math import gcd

import triton
from torch import Tensor

from tritonlib.launch import PreparedKernel


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

    @property
    def unit_bytes(self) -> int:
        """What sizes are counted in for a kernel, so that it knows how they divide: at most what a thread loads."""
        sizes = (self.first, self.run, self.stride_L, self.stride_K, self.stride_B, self.stride_N, self.stride_H)
        return gcd(PreparedKernel.ALIGN_BYTES, *sizes)

    def word_bytes(self, *memories: Tensor) -> int:
        """The widest word, of at most 4 bytes, in which sizes and addresses can be counted."""
        return gcd(4, self.unit_bytes, *(memory.data_ptr() for memory in memories))

    def can_be_digested(self, *memories: Tensor) -> bool:
        """Whether `gather_and_digest` takes them: all counted in words of 4 bytes, and runs of an even number of words.

        NOTE: not of rows of one word, for some of which the compiler of Triton 3.6 aborts the process (an assertion in
        LLVM's SLPVectorizer).
        """
        return self.word_bytes(*memories) == 4 and self.run % 8 == 0


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
    unit_bytes = places.unit_bytes
    lengths = (places.first, places.stride_L, places.stride_K, places.stride_B, places.stride_N, places.stride_H)
    return Cut(
        num_tiles=triton.cdiv(num_rows, tile_rows),
        arguments=(
            num_rows,
            rows_of_part,
            places.token_start,
            places.num_blocks,
            *(length // unit_bytes for length in lengths),
        ),
        constants={
            "KV_FACTOR": places.kv_factor,
            "NUM_HEADS": places.num_heads,
            "PIECES": run // row,
            "BLOCK_SIZE": places.block_size,
            "WORD_BYTES": word_bytes,
            "UNIT": unit_bytes // word_bytes,
            "ROWS": tile_rows,
            "WORDS": row,
        },
    )
