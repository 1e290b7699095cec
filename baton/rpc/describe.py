"""Asks one node for its status."""

import grpc

from baton.rpc.server import connect
from baton.rpc.status import from_rpc_error
from protos.baton.v1 import node_pb2, node_pb2_grpc

_TIMEOUT_S = 10.0


async def describe(address: str) -> node_pb2.NodeStatus:
    """The status of the node at host:port.

    Raises:
        BatonError: it cannot be reached, or is no node.
    """
    async with connect(address) as channel:
        try:
            return await node_pb2_grpc.NodeStub(channel).Describe(node_pb2.DescribeRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
