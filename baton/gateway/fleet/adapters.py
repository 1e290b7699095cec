"""Finds the adapters that the nodes have, and the revision of each that serves new requests. Pure."""

from collections.abc import Iterable

from baton.core.types import AdapterRef
from baton.gateway.fleet.fleet_node import FleetNode


def serving_adapters(nodes: Iterable[FleetNode], pairs: Iterable[tuple[FleetNode, FleetNode]]) -> dict[str, AdapterRef]:
    """The revision of each adapter that serves new requests, by name.

    While nodes have several revisions, one that a ready pair of nodes has goes first, then the one on most open nodes.

    Args:
        nodes: adapters that only unreachable nodes have count too: requests for them wait or fail like any other.
        pairs: pairs of a prefill node and a decode node.
    """
    having: dict[AdapterRef, int] = {}
    for node in nodes:
        for adapter in node.view().adapters:
            having[adapter] = having.get(adapter, 0) + node.open
    paired: set[AdapterRef] = set()
    if len(having) > len({adapter.name for adapter in having}):
        for prefill, decode in pairs:
            if prefill.open and decode.open and decode.incarnation in prefill.view().ready_peers:
                paired |= prefill.view().adapters & decode.view().adapters
    ranked = sorted(having, key=lambda adapter: (adapter in paired, having[adapter], adapter.revision))
    return {adapter.name: adapter for adapter in ranked}  # the last of each name


def nodes_with(adapter: AdapterRef, nodes: Iterable[FleetNode]) -> str:
    """Text on which nodes have the adapter, for the error of a request that no node can take."""
    names = ", ".join(node.name for node in nodes if adapter in node.view().adapters) or "no node"
    what = f"the adapter {adapter.name} of revision {adapter.revision} is on {names}"
    return f"{what}, and all nodes of a request need it"
