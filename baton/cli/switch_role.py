"""`baton role`: switches a running node to prefill or decode."""

import asyncio
from enum import StrEnum
from typing import Annotated

import typer

from baton.cli.access import ApiKey, ClientCa, use
from baton.client.client import DEFAULT_TARGET
from baton.client.operators import OperatorClient
from baton.core.limits import SECONDS_MAX
from baton.protos.v1 import node_status_pb2


class NodeRole(StrEnum):
    """A role that a node can have."""

    PREFILL = "prefill"
    DECODE = "decode"


_ROLES = {NodeRole.PREFILL: node_status_pb2.ROLE_PREFILL, NodeRole.DECODE: node_status_pb2.ROLE_DECODE}


def role(
    node: Annotated[str, typer.Argument(help="Name or address of the node, as `baton status` shows it.")],
    wanted: Annotated[NodeRole, typer.Argument(metavar="prefill|decode", help="The node's new role.")],
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    grace_s: Annotated[
        float | None,
        typer.Option(
            min=0, max=SECONDS_MAX, help="Seconds for running requests to finish; the rest continue on other nodes."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Switch even the last node of its present role.")] = False,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Switch a running node to another role. The node keeps its weights, and no request is lost."""
    use(api_key, client_ca)
    asyncio.run(_switch(target, node, wanted, grace_s=grace_s, force=force))


async def _switch(target: str, node: str, wanted: NodeRole, *, grace_s: float | None, force: bool) -> None:
    async with OperatorClient(target) as client:
        done = await client.switch_role(node, _ROLES[wanted], grace_s=grace_s, force=force)
    name = done.info.name
    print(
        f"{name} is a {wanted} node now, after {done.elapsed_s:.2f} s"
        if done.elapsed_s
        else f"{name} already is a {wanted} node"
    )
