"""Makes all nodes drop the KV of one cache salt."""

import asyncio
from collections.abc import Iterable

from baton.core.errors import BatonError
from baton.core.types import AdapterRef
from baton.gateway.fleet.fleet_node import FleetNode
from baton.gateway.request.connections import Connections
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import operations_pb2
from baton.rpc.convert import adapter_to_proto

# Nodes wait 10 s for their stores. Shorter than the time for which a node loads none of what it has dropped
# (`baton.engine.tiered_prefixes`), so that it gets nothing back from a node that is still dropping.
_TIMEOUT_S = 20.0


async def drop_kv(
    connections: Connections, cache_salt: str, adapters: Iterable[AdapterRef]
) -> list[operations_pb2.NodeKvDrop]:
    """Drops the KV of a cache salt on all nodes that the gateway knows. Returns what each has dropped, or its error.

    Args:
        cache_salt: as requests to nodes have it.
        adapters: besides those that nodes have.
    """
    nodes = list(connections.fleet.nodes())
    known = {*adapters, *(adapter for node in nodes for adapter in node.adapters)}
    request = node_pb2.DropKvRequest(cache_salt=cache_salt, adapters=map(adapter_to_proto, sorted(known)))
    return await asyncio.gather(*(_drop_on(connections, node, request) for node in nodes))


async def _drop_on(
    connections: Connections, node: FleetNode, request: node_pb2.DropKvRequest
) -> operations_pb2.NodeKvDrop:
    done = operations_pb2.NodeKvDrop(name=node.name, address=node.address)
    client = connections.clients().get(node.address)
    if client is None or not node.reachable:
        done.error = f"it is not reachable: {node.detail}" if node.detail else "it is not reachable"
        return done
    try:
        answer = await client.drop_kv(request, timeout_s=_TIMEOUT_S)
    except BatonError as error:
        done.error = error.message
    else:
        done.blocks = answer.blocks
        done.stores.extend(answer.stores)
    return done
