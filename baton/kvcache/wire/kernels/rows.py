"""Cuts a payload into rows for kernels: pieces of one token's adjacent bytes, all of one size."""

from dataclasses import dataclass

import triton

from baton.kvcache.wire.places import WirePlaces


@dataclass(frozen=True)
class Cut:
    """A payload cut into tiles of rows, as a kernel's arguments and constants."""

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
