"""Which adapters the nodes have, and which revision of each serves new requests. Pure."""

from collections.abc import Iterable

from baton.core.types import AdapterRef
from baton.gateway.fleet.fleet_node import FleetNode


def serving_adapters(nodes: Iterable[FleetNode], pairs: Iterable[tuple[FleetNode, FleetNode]]) -> dict[str, AdapterRef]:
    """One revision of each adapter, by name: while one takes the place of another, the revision that a whole pair has,
    then the one that more nodes have.

    Args:
        nodes: an adapter that only unreachable nodes have counts too: requests for it wait or fail as others do.
        pairs: of a prefill node and a decode node.
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
    """Which nodes have the adapter, for the error of a request that finds no pair of them."""
    names = ", ".join(node.name for node in nodes if adapter in node.view().adapters) or "no node"
    what = f"the adapter {adapter.name} of revision {adapter.revision} is on {names}"
    return f"{what}, and all nodes of a request need it"
