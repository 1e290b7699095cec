"""What operators get from a real gateway: the page's own state, one that goes away and comes back, a refused drop."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from rich.console import Console

from baton.cli.frame import Frame
from baton.cli.top import Frames
from baton.client.operators import OperatorClient
from baton.core.errors import InvalidRequest
from baton.core.types import AdapterRef
from baton.gateway.grpc.services import SERVICE_NAMES, add_services
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import read_served_model
from baton.rpc.server import GrpcServer
from baton.security.identity import EVERYBODY
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.unit.gateway.scripted_nodes import scripted_nodes

BOUND_S = 60


@dataclass
class Gateway:
    """A gateway whose gRPC server comes and goes."""

    settings: GatewaySettings
    connections: Connections
    serving: Serving
    view: View

    @asynccontextmanager
    async def served(self, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
        async with GrpcServer(listen, advertise=None) as server:
            add_services(server, self.settings, self.serving, self.connections, self.view)
            await server.start(SERVICE_NAMES)
            yield server.address


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    model = read_served_model(DEMO_MODELS / "llama", None)
    async with scripted_nodes(model.identity) as (prefill, decode):
        flags = ["--prefill", prefill.address, "--decode", decode.address]
        settings = read_settings(GatewaySettings, "gateway", ["--model", str(DEMO_MODELS / "llama"), *flags])
        async with Connections(settings, model) as connections:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            serving = Serving(settings, model, connections)
            async with View(settings, serving, connections.fleet, "gateway-1") as view:
                yield Gateway(settings, connections, serving, view)


def drawn(frame: Frame) -> str:
    console = Console(width=200, height=50, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(frame)
    return captured.get()


async def test_the_client_gets_what_the_page_gets(gateway: Gateway) -> None:
    async with gateway.served() as address, OperatorClient(address) as client:
        got, page = json.loads(await client.cluster_view()), json.loads(await gateway.view.shown_to(EVERYBODY))
    assert got.keys() == page.keys()
    assert (got["gateway"], got["sees"]) == ("gateway-1", "cluster")
    assert [node["role"] for node in got["nodes"]] == ["prefill", "decode"]
    assert got["nodes"] == page["nodes"]
    assert got["nodes"][0]["revision"]
    assert got["mixed"] == ""


@pytest.mark.parametrize(("name", "revision"), [("sql", ""), ("", "r1")])
async def test_a_drop_for_an_adapter_that_nobody_can_tell_is_refused(
    gateway: Gateway, name: str, revision: str
) -> None:
    """Its KV would stay, and the answer would say that nothing did."""
    async with gateway.served() as address, OperatorClient(address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.drop_kv("ours", adapters=[AdapterRef(name, revision)])
    assert refused.value.field == "adapters"


@pytest.fixture
def address() -> Iterator[str]:
    """Stays this test's own while no gateway listens there."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_gateway_that_goes_away_is_shown_with_its_last_view_until_it_is_back(
    gateway: Gateway, address: str
) -> None:
    async with gateway.served(address):
        frames = Frames(address)
        assert drawn(await frames.following()).startswith("gateway-1  llama")
    gone = drawn(await frames.following())
    assert "no answer: cannot reach" in gone
    assert "\ngateway-1  llama" in gone
    async with gateway.served(address):
        assert drawn(await frames.following()).startswith("gateway-1  llama")


async def test_a_gateway_that_was_never_there_is_awaited(gateway: Gateway, address: str) -> None:
    frames = Frames(address)
    assert drawn(await frames.following()).startswith("no answer yet: cannot reach")
    async with gateway.served(address):
        assert drawn(await frames.following()).startswith("gateway-1  llama")
