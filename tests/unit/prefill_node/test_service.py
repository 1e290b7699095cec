"""The service as a gateway sees it, over gRPC, and the role as the node process sees it."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.core.errors import Draining, InvalidRequest
from baton.node.assembly import Node
from baton.node.role_services import RoleServices
from baton.node.waiting import until
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.internal.v1 import prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import channel_options, connect
from baton.rpc.status import from_rpc_error
from prefill_node.service import PrefillService
from tests.unit.prefill_node.nodes import decode_node, pause_steps, prefill_node, prefill_settings


@asynccontextmanager
async def served(
    *, steps: float = math.inf
) -> AsyncIterator[tuple[Node, PrefillService, "prefill_pb2_grpc.PrefillAsyncStub"]]:
    """A node and its service, whose engine runs so many steps, and the others once the test is over."""
    settings = prefill_settings()
    node = prefill_node(settings)
    allow = pause_steps(node)
    allow(steps)
    service = PrefillService(node, settings)
    server = grpc.aio.server(options=channel_options())
    port = server.add_insecure_port("127.0.0.1:0")
    services = RoleServices(node.name)
    services.serve(node.name, service.servicers)
    services.add_to(server)
    async with node, connect(f"127.0.0.1:{port}") as channel:
        await server.start()
        try:
            yield node, service, prefill_pb2_grpc.PrefillStub(channel)
        finally:
            allow(math.inf)
            await service.close()
            await server.stop(grace=None)
        assert not service.busy


async def read_all(call: "grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillEvent]") -> None:
    while isinstance(await call.read(), pb.PrefillEvent):
        pass


async def test_a_gateway_connects_two_nodes_and_prefills() -> None:
    async with decode_node() as decode, served() as (node, service, stub):
        state = await stub.Connect(pb.ConnectRequest(decode_address=decode.address))
        assert state.phase == node_status_pb2.PEER_PHASE_READY
        events = [event async for event in stub.Prefill(await decode.request(1, 20))]
        assert [event.WhichOneof("event") for event in events][-2:] == ["first_token", "sent"]
        assert not service.busy

        status = node_status_pb2.NodeStatus()
        service.fill_status(status, node.transfer.counters().peers)
        (peer,) = status.peers
        assert peer.bytes_total == events[-1].sent.bytes_sent


async def test_errors_reach_the_gateway_with_their_details() -> None:
    async with decode_node() as decode, served() as (*_, stub):
        request = await decode.request(1, 20)
        request.ticket.token_stop = 21
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [event async for event in stub.Prefill(request)]
        error = from_rpc_error(raised.value)
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.value) == ("ticket", "0..21")


async def test_a_call_that_the_gateway_cancels_is_given_up() -> None:
    async with decode_node() as decode, served(steps=2) as (_, service, stub):
        call = stub.Prefill(await decode.request(1))
        assert isinstance(await call.read(), pb.PrefillEvent)
        assert service.busy
        call.cancel()
        assert await until(lambda: not service.busy, timeout_s=120.0)
        assert (await decode.message("quiet")).quiet.lease == 1


async def test_after_admission_has_stopped_calls_are_refused() -> None:
    async with decode_node() as decode, served() as (_, service, stub):
        service.stop_admission()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [event async for event in stub.Prefill(await decode.request(1, 20))]
        assert isinstance(from_rpc_error(raised.value), Draining)


async def test_closing_ends_the_calls_that_run() -> None:
    async with decode_node() as decode, served(steps=2) as (_, service, stub):
        call = stub.Prefill(await decode.request(1))
        assert isinstance(await call.read(), pb.PrefillEvent)
        await service.close()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await read_all(call)
        assert isinstance(from_rpc_error(raised.value), Draining)
