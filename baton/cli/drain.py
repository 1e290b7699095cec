"""`baton drain`: makes a running node finish its requests and end."""

import asyncio
from typing import Annotated

import typer

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.nodes import node_of
from baton.client.client import DEFAULT_TARGET
from baton.core.limits import SECONDS_MAX
from baton.rpc.describe import drain as ask_to_drain


def drain(
    node: Annotated[str, typer.Argument(help="Name or address of the node, as `baton status` shows it.")],
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    grace_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=SECONDS_MAX,
            help="Seconds for running requests to finish; the rest continue on other nodes. Default: the node's "
            "--drain-grace-s.",
        ),
    ] = None,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Make a node finish its requests and end.

    This command calls the node directly. In a cluster with TLS, set BATON_TLS_CERT, BATON_TLS_KEY and BATON_TLS_CA to
    an operator's certificate.
    """
    use(api_key, client_ca)
    asyncio.run(_drain(target, node, grace_s))


async def _drain(target: str, node: str, grace_s: float | None) -> None:
    found = await node_of(target, node)
    await ask_to_drain(found.address, grace_s)
    print(f"{found.name} is draining, and ends after its last request")
