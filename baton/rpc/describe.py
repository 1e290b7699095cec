"""Calls of operators to one node: its status, its experts' load, a drain, adapters."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from baton.core.errors import NoNode
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error, last_cause
from baton.security.roles import NODE
from baton.security.tls import InternalTls
from baton.settings.environment import environment_tls

Answer = TypeVar("Answer")

_TIMEOUT_S = 60.0  # as calls to a gateway, and longer than an attempt to connect; a node that compiles answers late
_LOAD_TIMEOUT_S = 600.0


async def describe(address: str) -> node_status_pb2.NodeStatus:
    """The status of the node at host:port. The call uses the certificate of BATON_TLS_CERT if that is set.

    Raises:
        BatonError: the address cannot be reached, or is not a node.
    """
    return await _ask(address, lambda node: node.Describe(node_pb2.DescribeRequest(), timeout=_TIMEOUT_S))


async def expert_load(address: str) -> node_pb2.GetExpertLoadResponse:
    """The load of the node's experts; calls it as `describe` does.

    Raises:
        BatonError: also if the node does not count their tokens.
    """
    return await _ask(address, lambda node: node.GetExpertLoad(node_pb2.GetExpertLoadRequest(), timeout=_TIMEOUT_S))


async def drain(address: str, grace_s: float | None) -> None:
    """Begins a drain, after which the node's process ends; returns at once. Calls the node as `describe` does.

    Args:
        grace_s: how long running requests may take to finish; None: the node's own setting.
    """
    request = node_pb2.DrainRequest(grace_s=grace_s)
    await _ask(address, lambda node: node.Drain(request, timeout=_TIMEOUT_S))


async def load_adapter(address: str, name: str, path: str) -> str:
    """Loads an adapter from a directory of the node's machine; returns its revision. Calls it as `describe` does.

    Raises:
        BatonError: also if the adapter does not fit the model, or the node has no free slot.
    """
    request = node_pb2.LoadAdapterRequest(name=name, path=path)
    answer = await _ask(address, lambda node: node.LoadAdapter(request, timeout=_LOAD_TIMEOUT_S))
    return answer.adapter.revision


async def unload_adapter(address: str, name: str) -> None:
    """Unloads an adapter: new requests cannot use it, and running requests go on. Calls the node as `describe` does.

    Raises:
        BatonError: also if the node does not have the adapter.
    """
    request = node_pb2.UnloadAdapterRequest(name=name)
    await _ask(address, lambda node: node.UnloadAdapter(request, timeout=_TIMEOUT_S))


async def _ask(address: str, call: "Callable[[node_pb2_grpc.NodeAsyncStub], Awaitable[Answer]]") -> Answer:
    tls = InternalTls.read(environment_tls(), None)
    async with connect(address, dial=None if tls is None else tls.to(NODE)) as channel:
        try:
            return await call(node_pb2_grpc.NodeStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                cure = "give the address of a running node; if it uses certificates, set BATON_TLS_CERT"
                what = f"cannot reach {address}: {last_cause(error)}"
                raise NoNode(what, field="address", value=address, cure=cure) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                cure = "give the address of a node of this release, not of a gateway; docs/upgrades.md has more"
                raise NoNode(f"{address} is not a node", field="address", value=address, cure=cure) from None
            raise from_rpc_error(error) from None
