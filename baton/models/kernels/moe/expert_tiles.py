"""Finds the expert and tile that a program of a grouped product computes, and the places of its rows.

Legend: M row of a tile (one assignment each, or a token), N output channel.
"""

import triton
import triton.language as tl

# Tiles that share weights or inputs run at about the same time, so L2 holds the shared data.
_GROUP_TILES = tl.constexpr(8)


@triton.jit
def tile_and_block(program, num_tiles, BLOCKS: tl.constexpr):
    """Returns a program's tile and its block of output channels, among the programs for routed experts."""
    group = program // (_GROUP_TILES * BLOCKS)
    first_tile = group * _GROUP_TILES
    group_tiles = tl.minimum(num_tiles - first_tile, _GROUP_TILES)
    within = program % (_GROUP_TILES * BLOCKS)
    return first_tile + within % group_tiles, within // group_tiles


@triton.jit
def places(tiles, tile, num_tiles, EACH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, places, whether each place is the expert's). With EACH, every assignment is a tile."""
    expert = tl.load(tiles + tile).to(tl.int32)
    if EACH:
        first = tile
        stop = tile + 1
    else:
        first = tl.load(tiles + num_tiles + tile)
        stop = tl.load(tiles + 2 * num_tiles + tile)
    places_M = first + tl.arange(0, BLOCK_M)
    return expert, places_M, places_M < stop


@triton.jit
def assignments(order, places_M, exists_M):
    assignments_M = places_M
    if order is not None:
        assignments_M = tl.load(order + places_M, mask=exists_M, other=0)
    return assignments_M


@triton.jit
def shared_tile(num_tokens, BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, block of output channels, tokens, whether each token exists) for a program of shared experts.
    These programs come first; programs with the same weights are neighbours."""
    token_tiles = tl.cdiv(num_tokens, BLOCK_M)
    tile, column = tl.program_id(0) % token_tiles, tl.program_id(0) // token_tiles
    tokens_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return column // BLOCKS, column % BLOCKS, tokens_M, tokens_M < num_tokens


@triton.jit
def store(out, values_NM, rows_M, channels_N, exists_M, OUT: tl.constexpr):
    values_MN = tl.trans(values_NM).to(out.dtype.element_ty)
    ptrs_MN = out + rows_M.to(tl.int64)[:, None] * OUT + channels_N[None, :]
    tl.store(ptrs_MN, values_MN, mask=exists_M[:, None] & (channels_N < OUT)[None, :])
