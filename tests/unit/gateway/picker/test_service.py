"""A whole picker over gRPC, in front of ports that serve gateways' metrics."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.errors import ConfigError
from baton.gateway.picker.choice import GatewayChoice
from baton.gateway.picker.gateways import GatewayPool, read_report
from baton.gateway.picker.process import SERVICE_NAME, new_choice, serve_picks, set_ready, start_serving
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.metric import ProcessRole
from baton.metrics.page import Page, join
from baton.metrics.port import MetricsPort
from baton.metrics.tally import Layout, Tally
from baton.protos.ext_proc import external_processor_pb2 as pb
from baton.protos.ext_proc import external_processor_pb2_grpc
from baton.rpc import sockets
from baton.rpc.channels import connect
from baton.security.certificates import write_set
from baton.settings.gateway_config import PickerSettings
from tests.tcp_server import close_server, tcp_server

FAST = {"poll_s": 0.05, "resolve_s": 0.05, "stale_s": 600.0}


@dataclass
class Door:
    """The metrics of one gateway, on a port."""

    address: str
    ready: bool = True
    running: int = 0
    waiting: int = 0

    async def page(self, names: frozenset[str]) -> bytes:
        tally = Tally(Layout(ProcessRole.GATEWAY))
        figures = [
            Figure("baton_ready", int(self.ready)),
            Figure("baton_num_requests_running", self.running),
            Figure("baton_num_requests_waiting", self.waiting),
        ]
        return await join(
            Exposition(ProcessRole.GATEWAY, tally.layout, 'a "model"} 1').pages(tally.own(), figures, names)
        )


@asynccontextmanager
async def door(bound: socket.socket | None = None) -> AsyncIterator[Door]:
    """Opened: at this port, or at a free one."""
    bound = bound or held_port()
    bound.listen()
    made = Door(sockets.address_of(bound))
    async with MetricsPort(bound, made.page) as port:
        try:
            yield made
        finally:  # a picker may be connecting
            assert port._server is not None
            await close_server(port._server)


def held_port() -> socket.socket:
    """A port that refuses connections, and that nobody else can take."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.setblocking(False)
    return bound


@dataclass
class Picker:
    """A picker that serves.

    Attributes:
        page: its own metrics.
    """

    address: str
    choice: GatewayChoice
    page: Page

    async def ask(self, **subset: str) -> pb.ProcessingResponse:
        """The answer to a request without a body."""
        request = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
        if subset:
            struct = request.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            struct.update({"x-gateway-destination-endpoint-subset": list(subset.values())})
        async with connect(self.address) as channel:
            call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(iter([request]))
            async for answer in call:
                return answer
        raise AssertionError("no answer came")

    async def until(self, ready: int, not_ready: int) -> None:
        """Waits until it sees so many gateways."""
        while self.choice.count(monotonic()) != (ready, not_ready):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def picker(gateways: str, **more: object) -> AsyncIterator[Picker]:
    settings = PickerSettings.model_validate({"pool": gateways, "fallbacks": 0, **FAST, **more})
    choice = new_choice(settings)
    async with AsyncExitStack() as stack:
        server, picks = serve_picks(settings, choice)
        await stack.enter_async_context(server)
        found = await stack.enter_async_context(GatewayPool(settings, choice))
        await start_serving(server)
        await found.until_known()
        await set_ready(server, ready=True)
        yield Picker(server.address, choice, picks.page)


def endpoint(answer: pb.ProcessingResponse) -> str:
    return str(MessageToDict(answer.dynamic_metadata)["envoy.lb"]["x-gateway-destination-endpoint"])


async def test_the_least_loaded_gateway_is_picked() -> None:
    async with door() as busy, door() as idle:
        busy.running = 90
        async with picker(f"{busy.address},{idle.address}") as served:
            assert endpoint(await served.ask()) == idle.address
            assert endpoint(await served.ask(only=busy.address)) == busy.address


async def test_a_gateway_that_drains_gets_no_more_requests() -> None:
    async with door() as one, door() as other, picker(f"{one.address},{other.address}") as served:
        await served.until(2, 0)
        one.ready = False
        await served.until(1, 1)
        other.running = 500
        assert {endpoint(await served.ask()) for _ in range(3)} == {other.address}


async def test_a_gateway_that_refuses_connections_is_left_out_until_it_answers() -> None:
    bound = held_port()
    address = sockets.address_of(bound)
    async with picker(address) as served:
        answer = await served.ask()
        assert answer.immediate_response.status.code == 503
        line = b'baton_picker_picks_total{model_name="",outcome="no_gateway",role="picker"} 1.0'
        assert line in await served.page(frozenset())
        async with door(bound):
            await served.until(1, 0)
            assert endpoint(await served.ask()) == address
        await served.until(0, 1)


async def test_something_else_at_a_gateways_address_is_no_gateway() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")

    async with tcp_server(answer) as port, picker(f"127.0.0.1:{port}") as served:
        assert served.choice.count(monotonic()) == (0, 1)


async def test_gateways_come_and_go_with_their_list(tmp_path: Path) -> None:
    listed = tmp_path / "gateways"
    async with door() as one, door() as other:
        listed.write_text(one.address)
        async with picker(f"file://{listed}") as served:
            await served.until(1, 0)
            listed.write_text(f"{one.address}\n{other.address}\n")
            await served.until(2, 0)
            listed.write_text(f"# {one.address}\n{other.address}  ")
            await served.until(1, 0)
            assert endpoint(await served.ask()) == other.address


async def test_load_may_be_read_at_another_port() -> None:
    async with door() as metrics:
        port = int(metrics.address.rpartition(":")[2])
        async with picker("127.0.0.1:8000", pool_metrics_port=port) as served:
            await served.until(1, 0)
            assert endpoint(await served.ask()) == "127.0.0.1:8000"


@pytest.mark.parametrize("name", ["", "liveness", "readiness", SERVICE_NAME])
async def test_health_has_the_names_of_the_protocol(name: str) -> None:
    async with door() as one, picker(one.address) as served, connect(served.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_bytes_that_are_no_message_end_their_own_call_only() -> None:
    async with door() as one, picker(one.address) as served, connect(served.address) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE_NAME}/Process")(iter([b"\xff\xff\xff"]))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert endpoint(await served.ask()) == one.address


async def test_other_machines_reach_it_with_tls_or_on_purpose_only() -> None:
    with pytest.raises(ConfigError, match="without TLS"):
        async with picker("127.0.0.1:1", listen="0.0.0.0:0"):
            pass
    async with door() as one, picker(one.address, listen="0.0.0.0:0", insecure=True) as served:
        assert endpoint(await served.ask()) == one.address


async def test_the_proxy_sees_its_certificate(tmp_path: Path) -> None:
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    pems = {"client_tls_cert": tmp_path / "clients.crt", "client_tls_key": tmp_path / "clients.key"}
    request = pb.ProcessingRequest(request_headers=pb.HttpHeaders(end_of_stream=True))
    trusted = grpc.ssl_channel_credentials((tmp_path / "ca.crt").read_bytes())
    async with (
        door() as one,
        picker(one.address, listen="0.0.0.0:0", **pems) as served,
        grpc.aio.secure_channel(served.address, trusted) as channel,
    ):
        call = external_processor_pb2_grpc.ExternalProcessorStub(channel).Process(iter([request]))
        assert [endpoint(answer) async for answer in call] == [one.address]


async def test_gateways_must_be_named() -> None:
    with pytest.raises(ConfigError, match="pool is empty"):
        async with picker(""):
            pass


def test_an_older_gateway_counts_as_ready() -> None:
    page = b'baton_num_requests_running{role="gateway"} 2.0\nbaton_num_requests_waiting{role="gateway"} 1.0\n'
    assert read_report(page, 5.0).ready
    assert read_report(page + b'baton_ready{role="gateway"} 0.0\n', 5.0).ready is False


@pytest.mark.parametrize("page", [b"", b"<html>", b"baton_num_requests_running 1\n", b"baton_ready{} x\n"])
def test_a_page_of_something_else_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError):
        read_report(page, 0.0)
