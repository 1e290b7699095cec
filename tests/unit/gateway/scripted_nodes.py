"""A prefill and a decode node on real gRPC servers whose answers a test writes by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import channel_options
from tests.unit.gateway.fleets import DECODE, PREFILL, peer, status


class ScriptedNode(node_pb2_grpc.NodeServicer, decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """Queues of received messages and of messages to send; None ends the stream."""

    def __init__(
        self, role: node_status_pb2.Role.ValueType, incarnation: int, model: node_status_pb2.ModelIdentity
    ) -> None:
        self.address = ""
        self.status = status(role, incarnation)
        self.status.info.model.MergeFrom(model)
        self.received: asyncio.Queue[decode_pb2.SessionRequest | prefill_pb2.PrefillRequest] = asyncio.Queue()
        self.answers: asyncio.Queue[decode_pb2.SessionResponse | None] = asyncio.Queue()
        self.events: asyncio.Queue[prefill_pb2.PrefillEvent | None] = asyncio.Queue()
        self.connected_to: list[str] = []
        self.call_ended = asyncio.Event()  # a Prefill call or a session
        self.report = asyncio.Event()  # sends the status again
        self.reports_all_the_time = False

    async def Watch(  # noqa: N802
        self, request: node_pb2.WatchRequest, context: object
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        yield self.status
        while self.reports_all_the_time:
            await asyncio.sleep(0)
            yield self.status
        while await self.report.wait():
            self.report.clear()
            yield self.status

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: object) -> node_status_pb2.PeerState:  # noqa: N802
        self.connected_to.append(request.decode_address)
        state = peer(21)
        self.status.peers.append(state)
        return state

    async def Pool(self, request: prefill_pb2.PoolRequest, context: object) -> prefill_pb2.PoolResponse:  # noqa: N802
        raise NotImplementedError

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.received.put_nowait(request)
        try:
            while (event := await self.events.get()) is not None:
                yield event
        finally:
            self.call_ended.set()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: object
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        reading = asyncio.create_task(self._read(requests))
        try:
            while (answer := await self.answers.get()) is not None:
                yield answer
        finally:
            reading.cancel()
            self.call_ended.set()

    async def _read(self, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        async for request in requests:
            self.received.put_nowait(request)

    # Methods that a gateway does not call.

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_status_pb2.NodeStatus:  # noqa: N802
        raise NotImplementedError

    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainResponse:  # noqa: N802
        raise NotImplementedError

    async def SwitchRole(  # noqa: N802
        self, request: object, context: object
    ) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        yield node_status_pb2.RoleSwitchProgress()

    async def LoadAdapter(self, request: object, context: object) -> node_pb2.LoadAdapterResponse:  # noqa: N802
        return node_pb2.LoadAdapterResponse()

    async def UnloadAdapter(self, request: object, context: object) -> node_pb2.UnloadAdapterResponse:  # noqa: N802
        return node_pb2.UnloadAdapterResponse()

    async def GetExpertLoad(self, request: object, context: object) -> node_pb2.GetExpertLoadResponse:  # noqa: N802
        return node_pb2.GetExpertLoadResponse()

    async def DropKv(self, request: object, context: object) -> node_pb2.DropKvResponse:  # noqa: N802
        return node_pb2.DropKvResponse()

    def Pull(self, requests: object, context: object) -> AsyncIterator[node_pb2.PullResponse]:  # noqa: N802
        raise NotImplementedError

    async def WatchCache(  # noqa: N802
        self, request: node_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.WatchCacheResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node publishes no cache events")
        yield node_pb2.WatchCacheResponse()  # makes it a generator, as gRPC expects of a streaming method

    def Pair(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        raise NotImplementedError

    async def submission(self) -> decode_pb2.SubmitRequest:
        request = await asyncio.wait_for(self.received.get(), 60)
        assert isinstance(request, decode_pb2.SessionRequest)
        assert request.HasField("submit")
        return request.submit

    def send_tokens(self, *tokens: decode_pb2.StepToken, key: int = 1) -> None:
        for token in tokens:
            token.key = key
        self.answers.put_nowait(decode_pb2.SessionResponse(step=decode_pb2.Step(tokens=tokens)))


@asynccontextmanager
async def scripted_nodes(
    model: node_status_pb2.ModelIdentity,
) -> AsyncIterator[tuple[ScriptedNode, ScriptedNode]]:
    """A prefill node and a decode node, on ports of their own."""
    nodes = ScriptedNode(PREFILL, 11, model), ScriptedNode(DECODE, 21, model)
    servers = []
    try:
        for node in nodes:
            server = grpc.aio.server(options=channel_options())
            node_pb2_grpc.add_NodeServicer_to_server(node, server)
            decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
            prefill_pb2_grpc.add_PrefillServicer_to_server(node, server)
            node.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            node.status.info.address = node.address
            await server.start()
            servers.append(server)
        yield nodes
    finally:
        for server in servers:
            await server.stop(None)
