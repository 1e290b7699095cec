"""`baton drop-kv`: makes all nodes drop the KV of a tenant."""

import asyncio
import json
from typing import Annotated

import typer
from google.protobuf.json_format import MessageToDict

from baton.cli.access import ApiKey, ClientCa, use
from baton.client.client import DEFAULT_TARGET
from baton.client.operators import OperatorClient
from baton.core.errors import InvalidRequest
from baton.core.log_lines import escaped
from baton.core.types import AdapterRef
from baton.protos.v1 import operations_pb2


def drop_kv(
    cache_salt: Annotated[str, typer.Argument(help='Cache salt as the requests give it; "" for requests without one.')],
    client: Annotated[
        str,
        typer.Option(help="Name of the API key, or subject of the token, of the requests. Each has salts of its own."),
    ] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REVISION",
            help="An adapter that no node has had since its start; may be repeated. KV of others is dropped anyway.",
        ),
    ] = None,
    no_salt: Annotated[
        bool, typer.Option("--no-salt", help='Without --client, "" needs this: it means everybody who gives no salt.')
    ] = False,
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Drop all KV of a cache salt on all nodes.

    It goes from caches, host memory, files and shared stores. Requests that run go on, and no other request finds their
    KV. Exits with 1 if a node may still have some.
    """
    use(api_key, client_ca)
    _check_salt(cache_salt, client, no_salt=no_salt)
    answer = asyncio.run(_drop(target, cache_salt, client, list(map(_adapter, adapter or []))))
    if as_json:
        print(json.dumps(MessageToDict(answer, always_print_fields_with_no_presence=True)))
    else:
        for node in answer.nodes:
            print(_line(node))
        if not answer.nodes:
            print("the gateway knows no node")
    if not answer.nodes or any(node.error or any(store.error for store in node.stores) for node in answer.nodes):
        raise typer.Exit(1)


def _check_salt(cache_salt: str, client: str, *, no_salt: bool) -> None:
    if no_salt and cache_salt:
        raise InvalidRequest(
            "both a cache salt and --no-salt are given", field="cache_salt", value=cache_salt, cure="give one of them"
        )
    if not (cache_salt or client or no_salt):
        raise InvalidRequest(
            "the cache salt is empty, which means all requests without one",
            field="cache_salt",
            value="",
            cure="add --no-salt if you mean them; a shell's unset variable is empty too",
        )


async def _drop(target: str, cache_salt: str, client: str, adapters: list[AdapterRef]) -> operations_pb2.DropKvResponse:
    async with OperatorClient(target) as operator:
        return await operator.drop_kv(cache_salt, client=client, adapters=adapters)


def _adapter(given: str) -> AdapterRef:
    name, _, revision = given.partition("=")
    if not name or not revision:
        raise InvalidRequest(
            f"{given!r} names no revision of an adapter", field="adapter", value=given, allowed=("NAME=REVISION",),
            cure="`baton adapter list --json` shows revisions",
        )  # fmt: skip
    return AdapterRef(name, revision)


def _line(node: operations_pb2.NodeKvDrop) -> str:
    name = escaped(node.name or node.address)
    if node.error:
        return f"{name}: NOT DROPPED, {escaped(node.error)}"
    parts = [f"cache {node.blocks} blocks"]
    for store in node.stores:
        failure = f" and may have more: {escaped(store.error)}" if store.error else ""
        parts.append(f"{escaped(store.name)} {store.entries} entries{failure}")
    return f"{name}: dropped {', '.join(parts)}"
