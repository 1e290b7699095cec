"""Looks up a gateway's nodes, for commands that call the nodes directly."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.client.operators import OperatorClient
from baton.core.errors import InvalidRequest, NoNode
from baton.core.log_lines import escaped


class KnownNode(NamedTuple):
    """A node as its gateway knows it; `adapters` maps names to revisions."""

    name: str
    address: str
    adapters: dict[str, str]


async def nodes_of(target: str) -> list[KnownNode]:
    """Returns the nodes that the gateway reaches.

    Raises:
        BatonError: the gateway cannot be reached, or requires an operator's key.
        NoNode: the gateway reaches no node.
    """
    async with OperatorClient(target) as client:
        reports = (await client.cluster_status()).nodes
    found = [
        KnownNode(
            escaped(report.status.info.name),
            report.address,
            {escaped(each.name): each.revision for each in report.status.adapters},
        )
        for report in reports
        if report.reachable
    ]
    if not found:
        raise NoNode(f"{target} reaches no node", field="target", value=target, cure="see `baton status`")
    return found


async def node_of(target: str, wanted: str) -> KnownNode:
    """Returns the node with that name or address.
    Raises:
        InvalidRequest: the gateway knows no such node.
    """
    nodes = await nodes_of(target)
    for node in nodes:
        if wanted in (node.name, node.address):
            return node
    names = tuple(node.name for node in nodes)
    raise InvalidRequest(f"{target} has no node {wanted}", field="node", value=wanted, allowed=names)


async def chosen_nodes(target: str, wanted: Sequence[str]) -> list[KnownNode]:
    """Returns the nodes with these names or addresses; if none are named, all of the gateway's nodes."""
    return [await node_of(target, each) for each in wanted] if wanted else await nodes_of(target)
