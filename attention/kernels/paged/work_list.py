"""Lists the tiles of a batch of prefills on the device, tiles with the most keys first.

A persistent kernel deals the list out to as many programs as the GPU runs at once, so that none waits for a long prompt
at the end. The list follows from tensors alone, so a captured step can make it. It is made once per batch and serves
all layers. Legend: R requests, N tiles.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers per tile in the list, padded to a power of two.
ROW_NUMBERS = 8
_BLOCK_TILES = 64
_BLOCK_REQUESTS = 64
_BLOCK_RANKED = 256


class WorkRow(NamedTuple):
    """One tile: its request, the request's queries [query_start, query_start + query_len) of the batch, the tile's
    first token among them, and the request's number of keys. Queries are a request's last tokens."""

    request: int
    query_start: int
    query_len: int
    first_token: int
    seq_len: int


@dataclass(frozen=True)
class WorkList:
    """The tiles of a batch, listed on the device.

    Attributes:
        tokens: tokens of a tile.
        rows: [N, 8] int32, `WorkRow`s; undefined after the first `count`.
        count: [1] int32.
        query_start_loc: the listed batch's query starts.
        num_programs: number of programs that share the list, which is how many the GPU runs at once.
    """

    tokens: int
    rows: Tensor
    count: Tensor
    query_start_loc: Tensor
    num_programs: int


def list_work(
    query_start_loc: Tensor, seq_lens: Tensor, *, num_tokens: int, tokens: int, num_programs: int
) -> WorkList:
    """Lists the tiles of requests whose queries `query_start_loc` counts, starting at any token.

    Args:
        query_start_loc, seq_lens: [R + 1] and [R] int32. The queries of a request of length 0 are listed too.
        num_tokens: upper bound of the tokens that `query_start_loc` counts.
        tokens: tokens of a tile.
    """
    num_reqs = seq_lens.shape[0]
    # Each request has one tile more than it fills, so that a tile's request follows from the starts alone.
    num_tiles = num_tokens // tokens + num_reqs
    unordered = torch.empty(num_tiles, ROW_NUMBERS, dtype=torch.int32, device=seq_lens.device)
    rows = torch.empty_like(unordered)
    count = torch.empty(1, dtype=torch.int32, device=seq_lens.device)
    grid = (triton.cdiv(num_tiles, _BLOCK_TILES),)
    _find_kernel[grid](
        unordered,
        query_start_loc,
        seq_lens,
        num_tiles,
        num_reqs,
        TOKENS=tokens,
        BLOCK_N=_BLOCK_TILES,
        BLOCK_R=_BLOCK_REQUESTS,
        NUMBERS=ROW_NUMBERS,
    )
    _order_kernel[grid](
        unordered, rows, count, num_tiles, BLOCK_N=_BLOCK_TILES, BLOCK_S=_BLOCK_RANKED, NUMBERS=ROW_NUMBERS
    )
    return WorkList(tokens, rows, count, query_start_loc, num_programs)


@triton.jit(
    do_not_specialize=["num_tiles", "num_reqs"], do_not_specialize_on_alignment=["query_start_ptr", "seq_lens_ptr"]
)
def _find_kernel(
    rows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_tiles,
    num_reqs,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Writes the tiles in the order of requests, with the cost as last number; a tile that no request fills costs 0."""
    tiles_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    before_N = tl.zeros([BLOCK_N], tl.int32)
    start = 0
    while start < num_reqs:
        requests_R = start + tl.arange(0, BLOCK_R)
        exists_R = requests_R < num_reqs
        first_tiles_R = tl.load(query_start_ptr + requests_R, mask=exists_R, other=0) // TOKENS + requests_R
        before_N += tl.sum(((first_tiles_R[None, :] <= tiles_N[:, None]) & exists_R[None, :]).to(tl.int32), 1)
        start += BLOCK_R
    requests_N = tl.maximum(before_N - 1, 0)
    exists_N = tiles_N < num_tiles
    query_starts_N = tl.load(query_start_ptr + requests_N, mask=exists_N, other=0)
    query_lens_N = tl.load(query_start_ptr + requests_N + 1, mask=exists_N, other=0) - query_starts_N
    seq_lens_N = tl.load(seq_lens_ptr + requests_N, mask=exists_N, other=0)
    first_tokens_N = (tiles_N - (query_starts_N // TOKENS + requests_N)) * TOKENS
    filled_N = (first_tokens_N >= 0) & (first_tokens_N < query_lens_N)
    # The cost is the keys up to the tile's last query plus a constant, so that a tile without keys is not left out.
    last_keys_N = seq_lens_N - query_lens_N + tl.minimum(first_tokens_N + TOKENS, query_lens_N)
    costs_N = tl.where(filled_N, 1 + tl.maximum(last_keys_N, 0), 0)
    rows_N = rows_ptr + tiles_N * NUMBERS
    tl.store(rows_N, requests_N, mask=exists_N)
    tl.store(rows_N + 1, query_starts_N, mask=exists_N)
    tl.store(rows_N + 2, query_lens_N, mask=exists_N)
    tl.store(rows_N + 3, first_tokens_N, mask=exists_N)
    tl.store(rows_N + 4, seq_lens_N, mask=exists_N)
    tl.store(rows_N + NUMBERS - 1, costs_N, mask=exists_N)


@triton.jit(do_not_specialize=["num_tiles"])
def _order_kernel(
    unordered_ptr,
    rows_ptr,
    count_ptr,
    num_tiles,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Writes each tile to its place by descending cost; tiles of equal cost keep their order."""
    tiles_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists_N = tiles_N < num_tiles
    costs_N = tl.load(unordered_ptr + tiles_N * NUMBERS + NUMBERS - 1, mask=exists_N, other=0)
    places_N = tl.zeros([BLOCK_N], tl.int32)
    filled = 0
    start = 0
    while start < num_tiles:
        others_S = start + tl.arange(0, BLOCK_S)
        others = unordered_ptr + others_S * NUMBERS + NUMBERS - 1
        other_costs_S = tl.load(others, mask=others_S < num_tiles, other=0)
        higher_NS = other_costs_S[None, :] > costs_N[:, None]
        equal_NS = (other_costs_S[None, :] == costs_N[:, None]) & (others_S[None, :] < tiles_N[:, None])
        places_N += tl.sum((higher_NS | equal_NS).to(tl.int32), 1)
        filled += tl.sum((other_costs_S > 0).to(tl.int32), 0)
        start += BLOCK_S
    numbers = tl.arange(0, NUMBERS)
    row_NX = tl.load(unordered_ptr + tiles_N[:, None] * NUMBERS + numbers[None, :], mask=exists_N[:, None], other=0)
    kept_N = exists_N & (costs_N > 0)
    tl.store(rows_ptr + places_N[:, None] * NUMBERS + numbers[None, :], row_NX, mask=kept_N[:, None])
    if tl.program_id(0) == 0:
        tl.store(count_ptr, filled)
