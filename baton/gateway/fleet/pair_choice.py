"""Chooses which prefill and decode nodes are paired before there is traffic. Pure.

In a small cluster every prefill node is paired with every decode node. A pair holds memory and connections on both
nodes and takes time to make. So in a large cluster each node chooses a few partners, whose number does not grow with
the cluster. A hash of both addresses ranks the partners: all gateways choose alike without agreement, and a node that
comes or goes changes few pairs.

Nodes that report where they are prefer partners that share the most labels with them. Where a group has too few nodes
of one role, the other role's nodes spill over to the whole cluster: a node is near to a limited number of nodes, those
of highest rank, and as far from the others as from a node of another group.

Nodes that are expected soon are chosen too. Otherwise the first nodes of a cluster that starts would be chosen by all
that come after them: in a simulation of 1,000 nodes some had 76 pairs.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from baton.core.types import AdapterRef
from baton.gateway.fleet.topology import Labels, shared_levels

# If one role has at most so many nodes, each of them is paired with all nodes of the other role.
ALL_UP_TO = 16
# Number of partners that each node chooses otherwise. Most choices are mutual: 500 nodes of each role have 9.6 each on
# average.
PARTNERS = 8
# Number of partners that nodes of one role choose among those that can be paired now.
LEAST_PARTNERS = 2
# Number of nodes to which a node is near, where both roles have equally many nodes.
NEAR = 2 * PARTNERS
_HASH_BITS = 60  # of a rank; the shared labels are above them

Matrix = NDArray[np.bool_]  # one row for each prefill node, one column for each decode node
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Candidate(NamedTuple):
    """A node that may be paired, now or once it is reachable.

    Args:
        revision: empty if it is unknown yet.
        open: whether it takes new requests, or probably will.
        refused: incarnations with which it can never be paired.
        topology: labels of where it is; None: unknown yet.
    """

    address: str
    incarnation: int
    revision: str
    open: bool
    reachable: bool
    adapters: frozenset[AdapterRef] = frozenset()
    refused: frozenset[int] = frozenset()
    topology: Labels | None = ()


def choose_pairs(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], *, all_up_to: int = ALL_UP_TO, partners: int = PARTNERS
) -> list[tuple[int, int]]:
    """The pairs to make now, as indices of prefill and decode nodes.

    In a large cluster both nodes of a chosen pair take new requests and have equal revisions. For each adapter, nodes
    that have it choose partners that have it too.
    """
    reachable = _both([each.reachable for each in prefills], [each.reachable for each in decodes])
    if min(len(prefills), len(decodes)) <= all_up_to:
        return [(int(prefill), int(decode)) for prefill, decode in np.argwhere(reachable)]
    usable = _usable(prefills, decodes)
    ranks = _near_first(prefills, decodes, _hashes(prefills, decodes), usable)
    chosen = _best(ranks, usable, partners)
    # Only nodes of the role with fewer nodes: if all did, the first ten nodes of a role would be chosen by hundreds.
    fewer = int(sum(each.reachable for each in prefills) < sum(each.reachable for each in decodes))
    chosen |= _best_along(fewer, ranks, usable & reachable, LEAST_PARTNERS)
    for having in _adapter_masks(prefills, decodes):
        chosen |= _best(ranks, usable & having, partners)
    chosen &= reachable
    return [(int(prefill), int(decode)) for prefill, decode in np.argwhere(chosen)]


def _near_first(
    prefills: Sequence[Candidate], decodes: Sequence[Candidate], hashes: NDArray[np.uint64], usable: Matrix
) -> NDArray[np.uint64]:
    """The ranks of pairs: by the number of shared labels, then by hash."""
    if not any(each.topology for nodes in (prefills, decodes) for each in nodes):
        return hashes
    low = hashes >> np.uint64(64 - _HASH_BITS)
    shared = shared_levels([each.topology for each in prefills], [each.topology for each in decodes])
    ranks = np.asarray(shared << np.uint64(_HASH_BITS) | low, np.uint64)
    known = _both([each.topology is not None for each in prefills], [each.topology is not None for each in decodes])
    counted = usable & known & (shared > 0)  # unknown nodes would use up limits of groups that they are not in
    near = _best_along(1, ranks, counted, _near(len(decodes), len(prefills)))
    near &= _best_along(0, ranks, counted, _near(len(prefills), len(decodes)))
    return np.where(near | ~known, ranks, low)


def _near(others: int, nodes: int) -> int:
    """The number of the other role's nodes to which a node is near. It is proportional to their number for each node,
    rounded to a power of two, so that a node that comes or goes rarely changes it."""
    return NEAR << max(0, round(math.log2(others / nodes)))


def _hashes(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> NDArray[np.uint64]:
    """A hash of each pair's addresses."""
    first, second, third = (np.uint64(each) for each in _MULTIPLIERS)
    rows = np.array([crc32(each.address.encode()) for each in prefills], np.uint64) * first
    columns = np.array([crc32(each.address.encode()) for each in decodes], np.uint64) * second
    mixed = rows[:, None] ^ columns[None, :]
    for multiplier in (second, third):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * multiplier
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def _usable(prefills: Sequence[Candidate], decodes: Sequence[Candidate]) -> Matrix:
    numbers: dict[str, int] = {"": 0}
    kinds = [[numbers.setdefault(each.revision, len(numbers)) for each in nodes] for nodes in (prefills, decodes)]
    rows, columns_of = np.array(kinds[0])[:, None], np.array(kinds[1])[None, :]
    usable: Matrix = (rows == columns_of) | (rows == 0) | (columns_of == 0)
    usable &= _both([each.open for each in prefills], [each.open for each in decodes])
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
        mask = _both([adapter in each.adapters for each in prefills], [adapter in each.adapters for each in decodes])
        masks[mask.tobytes()] = mask
    return list(masks.values())


def _both(prefills: Sequence[bool], decodes: Sequence[bool]) -> Matrix:
    """The pairs in which the flags of both nodes are set."""
    both: Matrix = np.array(prefills, bool)[:, None] & np.array(decodes, bool)[None, :]
    return both


def _best(ranks: NDArray[np.uint64], usable: Matrix, count: int) -> Matrix:
    """The usable pairs of highest rank, so many for each row and for each column."""
    return _best_along(1, ranks, usable, count) | _best_along(0, ranks, usable, count)


def _best_along(axis: int, ranks: NDArray[np.uint64], usable: Matrix, count: int) -> Matrix:
    """The usable pairs of highest rank, so many for each row (1) or for each column (0)."""
    ranked = np.where(usable, ranks, np.uint64(0))
    count = min(count, ranks.shape[axis])
    places = np.argpartition(ranked, -count, axis=axis)
    highest = places[:, -count:] if axis else places[-count:, :]
    chosen = np.zeros_like(usable)
    np.put_along_axis(chosen, highest, values=True, axis=axis)
    return chosen & usable
