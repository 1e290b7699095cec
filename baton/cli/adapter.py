"""`baton adapter`: loads, unloads and lists the LoRA adapters of running nodes."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.nodes import chosen_nodes, nodes_of
from baton.cli.program import new_app
from baton.client.client import DEFAULT_TARGET
from baton.rpc.describe import load_adapter, unload_adapter

_DIGITS = 12  # shown of a revision

Name = Annotated[str, typer.Argument(help="Name of the adapter. Clients send it as their model.")]
Nodes = Annotated[
    list[str] | None,
    typer.Option("--node", help="Name or address of a node; may be repeated. Default: all nodes of the gateway."),
]
Target = Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")]


def adapter_app() -> typer.Typer:
    """Returns the typer app with the commands of `baton adapter`."""
    app = new_app()
    app.callback()(_adapters)
    for name, command in (("list", list_adapters), ("load", load), ("unload", unload)):
        app.command(name)(command)
    return app


def _adapters() -> None:
    """List, load and unload LoRA adapters of running nodes."""


def list_adapters(
    target: Target = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Show each node's adapters with their revisions."""
    use(api_key, client_ca)
    nodes = asyncio.run(nodes_of(target))
    if as_json:
        print(json.dumps({node.name: node.adapters for node in nodes}))
        return
    for node in nodes:
        shown = ", ".join(f"{name} ({revision[:_DIGITS]})" for name, revision in node.adapters.items())
        print(f"{node.name}: {shown or 'none'}")


def load(
    name: Name,
    directory: Annotated[Path, typer.Argument(help="Directory of a PEFT adapter on the nodes' machines.")],
    node: Nodes = None,
    target: Target = DEFAULT_TARGET,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Load an adapter while requests run.

    Replaces another revision of the same name. Start the nodes with --max-adapters to reserve memory for adapters.
    """
    use(api_key, client_ca)
    asyncio.run(_load(target, node or [], name, directory))


def unload(
    name: Name,
    node: Nodes = None,
    target: Target = DEFAULT_TARGET,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Unload an adapter. Running requests keep it until they end."""
    use(api_key, client_ca)
    asyncio.run(_unload(target, node or [], name))


async def _load(target: str, wanted: list[str], name: str, directory: Path) -> None:
    for node in await chosen_nodes(target, wanted):
        revision = await load_adapter(node.address, name, str(directory))
        print(f"{node.name} has {name} ({revision[:_DIGITS]})", flush=True)


async def _unload(target: str, wanted: list[str], name: str) -> None:
    for node in await chosen_nodes(target, wanted):
        await unload_adapter(node.address, name)
        print(f"{node.name} no longer has {name}", flush=True)
