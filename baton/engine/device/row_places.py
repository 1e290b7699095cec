"""Which rows of a step this rank computes the attention of, and where every row's tokens lie in the tensors of all
ranks. Without attention data parallelism these are all rows, one after another.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.batch import BatchRow
from baton.engine.request import int_array
from baton.models.layers.token_exchange import TokenExchange, TokenShares

# Stands for the requests of a rank that has none in a step, because collectives want a token of each rank. Its KV is
# not written.
_IDLE_ROW = BatchRow("", int_array([0]), 0, int_array([0]), None)


class RowPlaces(NamedTuple):
    """
    Attributes:
        own: the rows whose attention is computed here.
        is_idle: whether these are only a row that stands for none.
        starts: place of each row's first token, of all rows.
        num_places: of all tokens.
        shares: None: all ranks have all rows.
    """

    own: Sequence[BatchRow]
    is_idle: bool
    starts: NDArray[np.int64]
    num_places: int
    shares: TokenShares | None


def place_rows(rows: Sequence[BatchRow], exchange: TokenExchange | None) -> RowPlaces:
    lengths = [len(row.token_ids) for row in rows]
    if exchange is None:
        starts = np.array([0, *accumulate(lengths)], np.int64)
        return RowPlaces(rows, is_idle=False, starts=starts[:-1], num_places=int(starts[-1]), shares=None)
    parallel = exchange.parallel
    filled = [0] * parallel.size
    within: list[int] = []
    for row, length in zip(rows, lengths, strict=True):
        within.append(filled[row.owner])
        filled[row.owner] += length
    shares = TokenShares.of([max(1, count) for count in filled])
    firsts = [shares.start(rank) for rank in range(parallel.size)]
    starts = np.array([firsts[row.owner] + place for row, place in zip(rows, within, strict=True)], np.int64)
    own = [row for row in rows if row.owner == parallel.rank]
    return RowPlaces(own or [_IDLE_ROW], not own, starts, shares.num_places, shares)
