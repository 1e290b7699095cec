"""The nodes of a gateway, for commands that then call the nodes themselves."""

from collections.abc import Sequence
from typing import NamedTuple

from baton.client.operators import OperatorClient
from baton.core.errors import InvalidRequest, NoNode
from baton.core.log_lines import escaped


class KnownNode(NamedTuple):
    """A node as its gateway knows it; `adapters`: revisions by name."""

    name: str
    address: str
    adapters: dict[str, str]


async def nodes_of(target: str) -> list[KnownNode]:
    """The nodes that the gateway reaches.

    Raises:
        BatonError: the gateway cannot be reached, or wants an operator's key.
        NoNode: it reaches none.
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
    """The node of that name or address.

    Raises:
        InvalidRequest: the gateway knows no such node.
    """
    nodes = await nodes_of(target)
    for node in nodes:
        if wanted in (node.name, node.address):
            return node
    names = tuple(node.name for node in nodes)
    raise InvalidRequest(f"{wanted} is no node of {target}", field="node", value=wanted, allowed=names)


async def chosen_nodes(target: str, wanted: Sequence[str]) -> list[KnownNode]:
    """The nodes of these names or addresses; all of the gateway's where none is named."""
    return [await node_of(target, each) for each in wanted] if wanted else await nodes_of(target)
