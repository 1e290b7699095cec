"""Cuts prompts into query tiles for the latent decode kernels, where a token has the same bits as a decode and in any
chunk of a prompt. Legend: R requests, J query tiles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attention.host_to_device import to_device
from attention.kernels.mla.cut_tiles import cut_tiles
from attention.kernels.mla.plan import MAX_QUERY_TILES, TILE, MLADecodePlan
from attention.metadata import CommonAttentionMetadata, PaddedBatch, check_causal

# Most queries in the latent space at once, for their memory; `MAX_QUERY_TILES` cuts where heads are many.
_RUN_QUERIES = 128 * 1024


@dataclass(frozen=True)
class QueryTiles:
    """Query tiles of consecutive prompt tokens, in any order.

    Attributes:
        start, stop: the tokens, counted from the first prefill token.
        seq_lens: [J] int32, number of tokens of the request up to the tile's last.
        tiles: [J, 3] int32, as in `attention.kernels.mla.decode`; query rows count from `start`.
    """

    start: int
    stop: int
    seq_lens: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class _Tiles:
    """Query tiles on the host: number of tokens of the request up to the tile's last, number of the tile's own tokens,
    and row of the block table."""

    seq_lens_J: NDArray[np.int64]
    counts_J: NDArray[np.int64]
    table_rows_J: NDArray[np.int64]


def plan_query_tiles(common: CommonAttentionMetadata, num_decodes: int, plan: MLADecodePlan) -> tuple[QueryTiles, ...]:
    """Returns the query tiles of all prefills, in runs whose partial results fit the plan's memory.

    Raises:
        InternalError: the batch is not causal.
    """
    if num_decodes == common.num_reqs:
        return ()
    check_causal(common)
    found = _find_tiles(common, num_decodes, plan.tile_tokens)
    ends_J = np.cumsum(found.counts_J)
    bounds, arrays = [], []
    for run in _runs(found, plan):
        start = int(ends_J[run.start] - found.counts_J[run.start])
        bounds.append((start, int(ends_J[run.stop - 1])))
        columns = (ends_J[run] - 1 - start, found.counts_J[run], found.table_rows_J[run])
        order_J = _mixed(found.seq_lens_J[run])
        arrays += [found.seq_lens_J[run][order_J].astype(np.int32), np.stack(columns, axis=1)[order_J].astype(np.int32)]
    on_device = to_device(arrays, common.block_table_tensor.device)
    return tuple(
        QueryTiles(start, stop, seq_lens, tiles)
        for (start, stop), seq_lens, tiles in zip(bounds, on_device[::2], on_device[1::2], strict=True)
    )


def cut_padded(batch: PaddedBatch, plan: MLADecodePlan) -> tuple[QueryTiles, ...]:
    """Returns the query tiles of all prompts, which begin with their first token, and of the padding. The device cuts
    them, in runs of fixed numbers of tokens."""
    num_tokens, num_reqs, tile_tokens = len(batch.slot_mapping), len(batch.seq_lens), plan.tile_tokens
    splits = -(-num_tokens // (plan.split_tiles * TILE))
    most_tiles = max(1, min(MAX_QUERY_TILES, len(plan.partial_lse) // (splits * tile_tokens)))
    # A tile has a token at least. Every request may have a tile that is not full, and so may the run's first token.
    run_tokens = max(most_tiles, (most_tiles - num_reqs - 1) * tile_tokens)
    run_tokens = max(1, min(run_tokens, _RUN_QUERIES // plan.partial_lse.shape[1]))
    starts = range(0, num_tokens, run_tokens)
    return tuple(_cut_run(batch, start, min(start + run_tokens, num_tokens), tile_tokens) for start in starts)


def _cut_run(batch: PaddedBatch, start: int, stop: int, tile_tokens: int) -> QueryTiles:
    num_tiles = min(stop - start, (stop - start) // tile_tokens + len(batch.seq_lens) + 1)
    cut = cut_tiles(
        batch.query_start_loc, batch.seq_lens, start=start, stop=stop, tile_tokens=tile_tokens, num_tiles=num_tiles
    )
    return QueryTiles(start, stop, *cut)


def _find_tiles(common: CommonAttentionMetadata, num_decodes: int, tile_tokens: int) -> _Tiles:
    starts_R = common.query_start_loc_cpu[num_decodes : common.num_reqs + 1].numpy().astype(np.int64)
    context_R = common.num_computed_tokens_cpu[num_decodes : common.num_reqs].numpy().astype(np.int64)
    stops_R = context_R + np.diff(starts_R)
    first_R = context_R // tile_tokens
    tiles_R = np.where(stops_R > context_R, -(-stops_R // tile_tokens) - first_R, 0)
    requests_J = np.repeat(np.arange(len(tiles_R)), tiles_R)
    before_R = np.cumsum(tiles_R) - tiles_R
    bases_J = (first_R[requests_J] + np.arange(len(requests_J)) - before_R[requests_J]) * tile_tokens
    seq_lens_J = np.minimum(bases_J + tile_tokens, stops_R[requests_J])
    counts_J = seq_lens_J - np.maximum(bases_J, context_R[requests_J])
    return _Tiles(seq_lens_J, counts_J, num_decodes + requests_J)


def _mixed(seq_lens_J: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns an order in which short and long sequences alternate: workers share splits evenly, but a short sequence
    does not fill its split."""
    by_length_J = np.argsort(seq_lens_J, kind="stable")
    order_J = np.empty_like(by_length_J)
    half = -(-len(order_J) // 2)
    order_J[::2], order_J[1::2] = by_length_J[:half], by_length_J[half:][::-1]
    return order_J


def _runs(found: _Tiles, plan: MLADecodePlan) -> Iterator[slice]:
    """Yields consecutive query tiles; one tile always fits."""
    tokens_J = np.cumsum(found.counts_J)
    places_J = np.cumsum(-(-found.seq_lens_J // (plan.split_tiles * TILE)) * plan.tile_tokens)
    run_tokens = _RUN_QUERIES // plan.partial_lse.shape[1]
    start = 0
    while start < len(tokens_J):
        tokens, places = (sums_J[start - 1] if start else 0 for sums_J in (tokens_J, places_J))
        stop = min(
            int(np.searchsorted(tokens_J, tokens + run_tokens, side="right")),
            int(np.searchsorted(places_J, places + len(plan.partial_lse), side="right")),
            start + MAX_QUERY_TILES,
        )
        yield slice(start, stop)
        start = stop
