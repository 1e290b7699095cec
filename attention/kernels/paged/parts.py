"""The parts of `unified_kernel` that are about one thing: which tile, which blocks, loads, types. Legend as there."""

import triton
import triton.language as tl

from tritonlib.fp8 import from_fp8


@triton.jit
def find_tile(query_start_ptr, tile, num_reqs, TOKENS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The request of a tile, and its first token there. Every request has a tile more than it fills, so that a tile's
    request follows from `query_start_loc` alone; tokens past the request's last are nobody's, and so are those below 0,
    which tiles in front of the first request begin with: `query_start_loc` need not begin with 0."""
    before = 0
    start = 0
    while start < num_reqs:
        requests_R = start + tl.arange(0, BLOCK_R)
        query_starts_R = tl.load(query_start_ptr + requests_R, mask=requests_R < num_reqs, other=0)
        first_tiles_R = query_starts_R // TOKENS + requests_R
        before += tl.sum(((first_tiles_R <= tile) & (requests_R < num_reqs)).to(tl.int32), 0)
        start += BLOCK_R
    request = tl.maximum(before - 1, 0)
    query_start = tl.load(query_start_ptr + request)
    query_len = tl.load(query_start_ptr + request + 1) - query_start
    return request, query_start, query_len, (tile - (query_start // TOKENS + request)) * TOKENS


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2 * 1.4426950408889634)) + 1.0)


@triton.jit
def in_type(stored, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    if stored.dtype.primitive_bitwidth == 8:
        return from_fp8(stored, INTERPRETED).to(dtype)
    return stored.to(dtype)


@triton.jit
def load_rows(pointer, places_N, mask_N, SIZE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK] channels of the given rows; 0 where there is nothing to read."""
    channels = tl.arange(0, BLOCK)
    places = pointer + places_N[:, None] + channels[None, :]
    if MASKED:
        return tl.load(places, mask=mask_N[:, None] & (channels < SIZE)[None, :], other=0.0)
    if SIZE < BLOCK:
        return tl.load(places, mask=(channels < SIZE)[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def find_blocks(table_ptr, tile, first_key, seq_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of a tile's keys: one where a block holds whole tiles, else one per key. Past the keys that may be
    read it is the nearest block that may."""
    if BLOCK_SIZE == 0:
        return 0
    elif BLOCK_SIZE % BLOCK_N == 0:  # noqa: RET505 (branches of the compiler)
        place = tl.minimum(tl.maximum(tile, first_key), seq_len - 1) // BLOCK_SIZE
        return tl.load(table_ptr + tl.maximum(place, 0)).to(tl.int64)
    else:
        keys_N = tl.minimum(tl.maximum(tile + tl.arange(0, BLOCK_N), first_key), seq_len - 1)
        return tl.load(table_ptr + tl.maximum(keys_N, 0) // BLOCK_SIZE).to(tl.int64)
