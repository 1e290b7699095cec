"""Chooses the few nodes of a large cluster among which one request is placed. Pure.

A comparison of all nodes takes 30 ms for 1,000 nodes, and the best of some random nodes is nearly as good as the best
of all. So a request is placed among random prefill nodes, those that have most of its prompt cached, those of its
session, and the decode nodes that are paired with the best of these.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from heapq import nlargest, nsmallest
from typing import NamedTuple

from numpy.random import Generator

from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.fleet.router import RoutedRequest

# In a cluster of at most so many nodes, every request is placed among all of them.
ALL_UP_TO = 64
_DRAWN = 24
_MOST_CACHED = 4
_BEST = 4
_PARTNERS_OF_LIKED = 2
_ENOUGH = 8


class Candidates(NamedTuple):
    """The nodes among which a request is placed."""

    prefills: Collection[FleetNode]
    decodes: Collection[FleetNode]


def shortlist(
    prefills: Mapping[str, FleetNode],
    decodes: Mapping[str, FleetNode],
    by_incarnation: Mapping[int, FleetNode],
    wanted: RoutedRequest,
    cached: Mapping[str, int],
    soonest: Callable[[FleetNode], tuple[bool, float]],
    random: Generator,
) -> Candidates:
    """The candidates for a request.

    Args:
        by_incarnation: decode nodes; some of them may be gone.
        cached: number of the prompt's tokens that nodes have cached, by address.
        soonest: key by which prefill nodes are compared: when the prompt would be computed.
    """
    drawn = _draw(list(prefills.values()), wanted, wanted.excluded_prefill, random)
    best = nsmallest(_BEST, {*drawn, *_liked(prefills, wanted, cached, wanted.excluded_prefill)}, key=soonest)
    chosen = {*best, *(prefills[address] for address in wanted.session_nodes if address in prefills)}
    partners = (by_incarnation.get(number) for node in chosen for number in node.ready_peers)
    present = (node for node in partners if node is not None and decodes.get(node.address) is node)
    paired = {node for node in present if _usable(node, wanted, wanted.excluded_decode)}
    for decode in _liked(decodes, wanted, cached, wanted.excluded_decode):
        paired.add(decode)
        of_it = (node for node in prefills.values() if decode.incarnation in node.ready_peers)
        usable = (node for node in of_it if _usable(node, wanted, wanted.excluded_prefill))
        chosen.update(nsmallest(_PARTNERS_OF_LIKED, usable, key=soonest))
    if len(paired) < _ENOUGH:
        paired |= set(_draw(list(decodes.values()), wanted, wanted.excluded_decode, random))
    return Candidates(chosen, paired)


def _draw(nodes: Sequence[FleetNode], wanted: RoutedRequest, excluded: Set[int], random: Generator) -> list[FleetNode]:
    """Random usable nodes."""
    usable = [node for node in _sample(nodes, random) if _usable(node, wanted, excluded)]
    if len(usable) >= _ENOUGH:
        return usable
    usable = [node for node in nodes if _usable(node, wanted, excluded)]
    return _sample(usable, random)


def _sample(nodes: Sequence[FleetNode], random: Generator) -> list[FleetNode]:
    places = random.choice(len(nodes), min(_DRAWN, len(nodes)), replace=False)
    return [nodes[place] for place in places.tolist()]


def _liked(
    nodes: Mapping[str, FleetNode], wanted: RoutedRequest, cached: Mapping[str, int], excluded: Set[int]
) -> Iterable[FleetNode]:
    """The usable nodes that served the session last, or have most of the prompt cached."""
    having = nlargest(_MOST_CACHED, (address for address in cached if address in nodes), key=cached.__getitem__)
    found = (nodes[address] for address in (*having, *wanted.session_nodes) if address in nodes)
    return (node for node in found if _usable(node, wanted, excluded))


def _usable(node: FleetNode, wanted: RoutedRequest, excluded: Set[int]) -> bool:
    return (
        node.open
        and wanted.revision in ("", node.revision)
        and (wanted.adapter is None or wanted.adapter in node.adapters)
        and node.incarnation not in excluded
    )
