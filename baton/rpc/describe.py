"""Asks one node for its status, and for what only operators see."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from baton.core.errors import NoNode
from baton.protos.v1 import node_pb2, node_pb2_grpc
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error, last_cause
from baton.security.roles import NODE
from baton.security.tls import InternalTls
from baton.settings.environment import environment_tls

Answer = TypeVar("Answer")

_TIMEOUT_S = 10.0


async def describe(address: str) -> node_pb2.NodeStatus:
    """The status of the node at host:port, asked with the certificate of BATON_TLS_CERT if that is set.

    Raises:
        BatonError: it cannot be reached, or is no node.
    """
    return await _ask(address, lambda node: node.Describe(node_pb2.DescribeRequest(), timeout=_TIMEOUT_S))


async def expert_load(address: str) -> node_pb2.GetExpertLoadResponse:
    """The tokens of the node's experts; asks as `describe`.

    Raises:
        BatonError: also where the node does not count them.
    """
    return await _ask(address, lambda node: node.GetExpertLoad(node_pb2.GetExpertLoadRequest(), timeout=_TIMEOUT_S))


async def _ask(address: str, call: "Callable[[node_pb2_grpc.NodeAsyncStub], Awaitable[Answer]]") -> Answer:
    tls = InternalTls.read(environment_tls(), None)
    async with connect(address, dial=None if tls is None else tls.to(NODE)) as channel:
        try:
            return await call(node_pb2_grpc.NodeStub(channel))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                cure = "give the address of a node that runs; one with certificates wants BATON_TLS_CERT"
                what = f"cannot reach {address}: {last_cause(error)}"
                raise NoNode(what, field="address", value=address, cure=cure) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                cure = "give the address of a node, not of a gateway"
                raise NoNode(f"{address} is not a node", field="address", value=address, cure=cure) from None
            raise from_rpc_error(error) from None
