"""Chooses which prefill and decode nodes are paired before there is traffic. Pure.

In a small cluster every prefill node is paired with every decode node. A pair holds memory and connections on both
nodes and takes time to make. So in a large cluster each node chooses a few partners, whose number does not grow with
the cluster. A hash of both nodes ranks the partners: all gateways choose alike without agreement, and a node that comes
or goes changes few pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.core.types import AdapterRef

# If one role has at most so many nodes, each of them is paired with all nodes of the other role.
ALL_UP_TO = 16
# Number of partners that each node chooses otherwise. Most choices are mutual: 500 nodes of each role have 9.6 each on
# average.
PARTNERS = 8

Matrix = NDArray[np.bool_]  # one row for each prefill node, one column for each decode node
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Candidate(NamedTuple):
    """A node that may be paired.

    Args:
        open: whether it takes new requests.
        refused: incarnations with which it can never be paired.
    """

    incarnation: int
    revision: str
    open: bool
    adapters: frozenset[AdapterRef] = frozenset()
    refused: frozenset[int] = frozenset()


def choose_pairs(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], *, all_up_to: int = ALL_UP_TO, partners: int = PARTNERS
) -> list[tuple[int, int]]:
    """The pairs to make, as indices of prefill and decode nodes.

    In a large cluster both nodes of a chosen pair take new requests and have equal revisions. For each adapter, nodes
    that have it choose partners that have it too.
    """
    if min(len(prefills), len(decodes)) <= all_up_to:
        return [(prefill, decode) for prefill in range(len(prefills)) for decode in range(len(decodes))]
    ranks = _ranks(prefills, decodes)
    usable = _usable(prefills, decodes)
    chosen = _best(ranks, usable, partners)
    for having in _adapter_masks(prefills, decodes):
        chosen |= _best(ranks, usable & having, partners)
    return [(int(prefill), int(decode)) for prefill, decode in np.argwhere(chosen)]


def _ranks(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> NDArray[np.uint64]:
    """A hash of each pair's incarnations."""
    first, second, third = (np.uint64(each) for each in _MULTIPLIERS)
    rows = np.array([each.incarnation for each in prefills], np.uint64) * first
    columns = np.array([each.incarnation for each in decodes], np.uint64) * second
    mixed = rows[:, None] ^ columns[None, :]
    for multiplier in (second, third):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * multiplier
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def _usable(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Matrix:
    numbers: dict[str, int] = {}
    kinds = [[numbers.setdefault(each.revision, len(numbers)) for each in nodes] for nodes in (prefills, decodes)]
    usable: Matrix = np.array(kinds[0])[:, None] == np.array(kinds[1])[None, :]
    usable &= np.array([each.open for each in prefills])[:, None]
    usable &= np.array([each.open for each in decodes])[None, :]
    columns = {each.incarnation: column for column, each in enumerate(decodes)}
    for row, prefill in enumerate(prefills):
        for incarnation in prefill.refused & columns.keys():
            usable[row, columns[incarnation]] = False
    return usable


def _adapter_masks(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> list[Matrix]:
    """For each adapter that not all nodes have: the pairs of nodes that both have it. Equal ones come once."""
    sets = {each.adapters for nodes in (prefills, decodes) for each in nodes}
    some = frozenset[AdapterRef]().union(*sets) - frozenset.intersection(*sets)
    masks: dict[bytes, Matrix] = {}
    for adapter in some:
        rows, columns = (np.array([adapter in each.adapters for each in nodes]) for nodes in (prefills, decodes))
        masks[rows.tobytes() + columns.tobytes()] = rows[:, None] & columns[None, :]
    return list(masks.values())


def _best(ranks: NDArray[np.uint64], usable: Matrix, count: int) -> Matrix:
    """The usable pairs of highest rank, so many for each row and for each column."""
    ranked = np.where(usable, ranks, np.uint64(0))
    chosen = np.zeros_like(usable)
    by_row = np.argpartition(ranked, -count, axis=1)[:, -count:]
    np.put_along_axis(chosen, by_row, values=True, axis=1)
    by_column = np.argpartition(ranked, -count, axis=0)[-count:, :]
    np.put_along_axis(chosen, by_column, values=True, axis=0)
    return chosen & usable
