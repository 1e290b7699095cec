"""Simple policies for choosing nodes, as baselines for the gateway's own. Pure."""

from collections.abc import Sequence
from itertools import count

from baton.core.types import LocalPolicy
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.router import RoutedRequest
from baton.planner.cluster import Choose


def round_robin() -> Choose:
    """Each node in turn."""
    requests = count()

    def choose(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement:
        number = next(requests)
        return _placed(decodes[number % len(decodes)], prefills[number % len(prefills)] if prefills else None, wanted)

    return choose


def least_loaded(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement:
    """The nodes with the fewest requests."""

    def load(node: NodeView) -> tuple[int, int]:
        return node.load, node.turn

    return _placed(min(decodes, key=load), min(prefills, key=load, default=None), wanted)


def shortest_queue(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement:
    """The decode node with the fewest requests, and the prefill node whose prompts take the least time."""
    decode = min(decodes, key=lambda node: (node.load, node.turn))
    return _placed(decode, min(prefills, key=lambda node: (node.queue_s, node.turn), default=None), wanted)


def without_caches(
    decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest
) -> Placement | None:
    """The gateway's choice, with no knowledge of prefix caches."""
    return place([_uncached(node) for node in decodes], [_uncached(node) for node in prefills], wanted)


def _placed(decode: NodeView, prefill: NodeView | None, wanted: RoutedRequest) -> Placement:
    local = prefill is None or wanted.policy is LocalPolicy.LOCAL
    return Placement(Route.LOCAL if local else Route.REMOTE, decode, None if local else prefill, 0, "", None)


def _uncached(node: NodeView) -> NodeView:
    view = object.__new__(NodeView)
    view.__dict__.update(node.__dict__, cached_tokens=0)
    return view
