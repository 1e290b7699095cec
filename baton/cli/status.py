"""`baton status`: prints a gateway's view of its cluster, as tables or as JSON."""

import asyncio
import json
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.status_json import to_json
from baton.cli.status_tables import render
from baton.client.client import DEFAULT_TARGET
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError
from baton.core.logs import write_line
from baton.protos.v1 import operations_pb2

# Least width if the output is not a terminal, so that long names do not wrap.
_WIDTH_IN_FILES = 160
_WATCH_S = 1.0


def status(
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat every second until Ctrl-C.")] = False,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Show nodes, requests, blocks and prefill/decode pairs."""
    use(api_key, client_ca)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    if not watch:
        _print(console, asyncio.run(_ask(target)), as_json=as_json)
        return
    try:
        asyncio.run(_watch(target, console, as_json=as_json))
    except KeyboardInterrupt:
        raise typer.Exit from None


def _print(console: Console, cluster: operations_pb2.ClusterStatusResponse, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(cluster)), flush=True)
    else:
        console.print(render(cluster))


async def _watch(target: str, console: Console, *, as_json: bool) -> None:
    """Shows the status every second. An error is shown in its place, and the gateway is asked again."""
    in_place = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) if in_place else nullcontext() as live:
        while True:
            try:
                cluster = await _ask(target)
            except BatonError as error:
                if live is None:
                    write_line(f"baton: {error}")
                else:
                    live.update(Text(str(error), style="red"), refresh=True)
            else:
                if live is None:
                    _print(console, cluster, as_json=as_json)
                else:
                    live.update(render(cluster), refresh=True)
            await asyncio.sleep(_WATCH_S)


async def _ask(target: str) -> operations_pb2.ClusterStatusResponse:
    async with OperatorClient(target) as client:
        return await client.cluster_status()
