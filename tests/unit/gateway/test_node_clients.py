"""The gateway follows a node's prefix cache whatever a message does to its own code."""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.rpc.server import channel_options
from gateway.node_clients import NodeClient, WatchCallbacks
from protos.baton.v1 import node_pb2, node_pb2_grpc
from tests.unit.gateway.fleets import DECODE, status

BOUND_S = 60.0


class Publishing(node_pb2_grpc.NodeServicer):
    """A node that publishes a snapshot to everyone who follows its cache."""

    def __init__(self) -> None:
        self.asked_after: list[int] = []

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: object
    ) -> AsyncIterator[node_pb2.NodeStatus]:
        yield status(DECODE, 1)
        await asyncio.Event().wait()

    async def WatchCache(  # noqa: N802
        self, request: node_pb2.WatchCacheRequest, context: object
    ) -> AsyncIterator[node_pb2.WatchCacheResponse]:
        self.asked_after.append(request.after_sequence)
        yield node_pb2.WatchCacheResponse(sequence=7, incarnation=1, snapshot=True)
        await asyncio.Event().wait()

    async def Describe(self, request: object, context: object) -> node_pb2.NodeStatus:  # noqa: N802
        return status(DECODE, 1)

    async def Drain(self, request: object, context: object) -> node_pb2.DrainResponse:  # noqa: N802
        return node_pb2.DrainResponse()

    async def SwitchRole(  # noqa: N802
        self, request: object, context: object
    ) -> AsyncIterator[node_pb2.SwitchRoleResponse]:
        yield node_pb2.SwitchRoleResponse()


async def test_a_message_about_the_cache_that_our_code_cannot_take_is_logged_and_a_snapshot_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken, failures = asyncio.Event(), ["the first message"]

    def take(_: node_pb2.WatchCacheResponse) -> bool:
        if failures:
            raise ArithmeticError(failures.pop())
        taken.set()
        return True

    node, server = Publishing(), grpc.aio.server(options=channel_options())
    node_pb2_grpc.add_NodeServicer_to_server(node, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = NodeClient(address, WatchCallbacks(lambda _: None, lambda _: None, take), lambda: None)
    watching = asyncio.create_task(client.watch())
    try:
        with caplog.at_level(logging.ERROR, "baton"):
            await asyncio.wait_for(taken.wait(), BOUND_S)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await client.close()
        await server.stop(None)
    assert node.asked_after == [0, 0]
    assert "ArithmeticError: the first message" in caplog.text
