"""Cuts prompts into query tiles on the device, for captured steps. `attention.mla_query_tiles` does it on the host.

Legend: R requests, J query tiles.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILES_OF_A_PROGRAM = 16


def cut_tiles(
    query_start_loc: Tensor, seq_lens: Tensor, *, start: int, stop: int, tile_tokens: int, num_tiles: int
) -> tuple[Tensor, Tensor]:
    """Returns the lengths [J] and the query tiles [J, 3] of the tokens from `start` to `stop`.

    A tile of a request of length 0 has no keys, so its tokens get outputs of 0. Tiles past the last have no tokens.

    Args:
        query_start_loc, seq_lens: [R + 1] and [R] int32, of requests that begin with their first token.
        num_tiles: J, at least the number of tiles of these tokens.
    """
    num_reqs = len(seq_lens)
    lens_J, tiles_J = seq_lens.new_empty(num_tiles), seq_lens.new_empty(num_tiles, 3)
    _cut[(triton.cdiv(num_tiles, _TILES_OF_A_PROGRAM),)](
        query_start_loc,
        seq_lens,
        lens_J,
        tiles_J,
        num_reqs,
        start,
        stop,
        num_tiles,
        TOKENS=tile_tokens,
        BLOCK_R=max(16, triton.next_power_of_2(num_reqs)),
        BLOCK_J=_TILES_OF_A_PROGRAM,
    )
    return lens_J, tiles_J


@triton.jit(do_not_specialize=["num_reqs", "start", "stop", "num_tiles"])
def _cut(
    query_start_ptr,
    seq_lens_ptr,
    lens_ptr,
    tiles_ptr,
    num_reqs,
    start,
    stop,
    num_tiles,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    requests_R = tl.arange(0, BLOCK_R)
    exists_R = requests_R < num_reqs
    query_starts_R = tl.load(query_start_ptr + requests_R, mask=exists_R, other=0)
    query_stops_R = tl.load(query_start_ptr + requests_R + 1, mask=exists_R, other=0)
    first_R = tl.maximum(query_starts_R, start) - query_starts_R
    last_R = tl.minimum(query_stops_R, stop) - query_starts_R
    tiles_R = tl.where(last_R > first_R, (last_R + TOKENS - 1) // TOKENS - first_R // TOKENS, 0)
    stops_R = tl.cumsum(tiles_R, 0)
    total = tl.sum(tiles_R, 0)

    # Tiles from the front and from the back alternate: workers share splits evenly, but a short sequence does not fill
    # its split.
    places_J = tl.program_id(0) * BLOCK_J + tl.arange(0, BLOCK_J)
    exists_J = places_J < total
    numbers_J = tl.where(places_J % 2 == 0, places_J // 2, total - 1 - places_J // 2)
    before_JR = stops_R[None, :] <= numbers_J[:, None]
    request_J = tl.sum(before_JR.to(tl.int32), 1)
    numbers_J -= tl.sum(tl.where(before_JR, tiles_R[None, :], 0), 1)
    query_start_J = tl.load(query_start_ptr + request_J, mask=exists_J, other=0)
    query_stop_J = tl.load(query_start_ptr + request_J + 1, mask=exists_J, other=0)
    has_keys_J = tl.load(seq_lens_ptr + request_J, mask=exists_J, other=0) > 0
    first_J = tl.maximum(query_start_J, start) - query_start_J
    last_J = tl.minimum(query_stop_J, stop) - query_start_J
    base_J = (first_J // TOKENS + numbers_J) * TOKENS
    stop_J = tl.minimum(base_J + TOKENS, last_J)
    count_J = tl.where(exists_J, stop_J - tl.maximum(base_J, first_J), 0)
    mask_J = places_J < num_tiles
    tl.store(lens_ptr + places_J, tl.where(has_keys_J, stop_J, 0), mask=mask_J)
    tl.store(tiles_ptr + 3 * places_J, query_start_J + stop_J - 1 - start, mask=mask_J)
    tl.store(tiles_ptr + 3 * places_J + 1, count_J, mask=mask_J)
    tl.store(tiles_ptr + 3 * places_J + 2, request_J, mask=mask_J)
