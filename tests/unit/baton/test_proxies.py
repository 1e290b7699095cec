"""Which proxy a client uses, by the environment, and that channels within the cluster use none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client.client import AsyncClient
from baton.core.errors import NoNode
from baton.core.proxies import proxy_for
from baton.rpc.channels import connect
from baton.rpc.server import GrpcServer
from tests.tcp_server import tcp_server

PROXY = "http://proxy:3128"
FAR = "gateway.example.org:7000"
DEAD = "http://user:secret@127.0.0.1:9"


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        ({"http_proxy": PROXY}, "proxy:3128 (http_proxy)"),
        ({"HTTP_PROXY": PROXY}, "proxy:3128 (HTTP_PROXY)"),
        ({"ALL_PROXY": "proxy:3128"}, "proxy:3128 (ALL_PROXY)"),
        ({"http_proxy": "http://other:1", "https_proxy": PROXY}, "proxy:3128 (https_proxy)"),
        ({"https_proxy": "http://other:1", "grpc_proxy": PROXY}, "proxy:3128 (grpc_proxy)"),
        ({"grpc_proxy": "", "HTTPS_PROXY": PROXY}, "proxy:3128 (HTTPS_PROXY)"),
        ({"https_proxy": "http://user:secret@proxy:3128"}, "proxy:3128 (https_proxy)"),
        ({"all_proxy": "socks5://proxy:1080"}, None),
        ({"https_proxy": "https://proxy:3129", "http_proxy": PROXY}, "proxy:3128 (http_proxy)"),
        ({"http_proxy": "http://"}, None),
    ],
)
def test_the_first_http_proxy_of_the_environment_is_used(variables: dict[str, str], found: str | None) -> None:
    proxy = proxy_for(FAR, variables)
    assert (None if proxy is None else str(proxy)) == found


@pytest.mark.parametrize(
    ("target", "no_proxy", "direct"),
    [
        (FAR, "*", True),
        (FAR, "gateway.example.org", True),
        (FAR, "GATEWAY.example.org", True),
        (FAR, "other,.example.org", True),
        (FAR, "other *.example.org", True),
        (FAR, "example.org", True),
        (FAR, "ample.org", False),
        (FAR, "gateway.example.org:7000", True),
        (FAR, "gateway.example.org:7001", False),
        (FAR, "", False),
        (FAR, ",", False),
        ("10.1.2.3:7000", "10.0.0.0/8", True),
        ("10.1.2.3:7000", "10.1.2.3", True),
        ("11.1.2.3:7000", "10.0.0.0/8", False),
        ("[fd00::1]:7000", "fd00::/8", True),
        ("[fd00::1]:7000", "[fd00::1]:7000", True),
        ("dns:///gateway.example.org:7000", "example.org", True),
    ],
)
def test_no_proxy_names_what_is_reached_directly(target: str, no_proxy: str, direct: bool) -> None:
    assert (proxy_for(target, {"http_proxy": PROXY, "NO_PROXY": no_proxy}) is None) == direct
    assert (proxy_for(target, {"http_proxy": PROXY, "no_grpc_proxy": no_proxy, "no_proxy": "x"}) is None) == direct


@asynccontextmanager
async def http_proxy(to: str) -> AsyncIterator[tuple[str, list[str]]]:
    """An HTTP proxy that connects all its clients with `to`; yields its address, and what they asked for."""
    asked: list[str] = []
    host, _, port = to.rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.decode().split("\r\n")[0])
        there, back = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(carry(reader, back), carry(there, writer))

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async with tcp_server(serve) as own_port:
        yield f"http://127.0.0.1:{own_port}", asked


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """The address of a server without the Generation service."""
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        await server.start([])
        yield server.address


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "HTTP_PROXY", "all_proxy"])
async def test_a_client_reaches_a_far_gateway_through_the_proxy(
    server: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async with http_proxy(server) as (address, asked):
        monkeypatch.setenv(name, address)
        async with AsyncClient(FAR) as client:
            with pytest.raises(NoNode, match="is not a gateway"):
                await client.tokenize("x")
    assert asked == [f"CONNECT {FAR} HTTP/1.1"]


async def test_an_unreachable_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", DEAD)
    async with AsyncClient(FAR) as client:
        with pytest.raises(NoNode) as caught:
            await client.tokenize("x")
    assert f"cannot reach {FAR} through the proxy 127.0.0.1:9 (https_proxy): " in str(caught.value)
    assert "no_proxy" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["grpc_proxy", "https_proxy", "http_proxy", "HTTP_PROXY", "all_proxy"])
async def test_nothing_within_the_cluster_or_on_this_machine_uses_a_proxy(
    server: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, DEAD)
    async with AsyncClient(server) as client:
        with pytest.raises(NoNode, match="is not a gateway"):
            await client.tokenize("x")
    async with connect(server) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
