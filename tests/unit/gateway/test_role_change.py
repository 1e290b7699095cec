"""Which node may switch its role, and how a gateway follows: it uses no node in a role that its certificate forbids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from baton.core.errors import BatonError, InvalidRequest, NoNode, Overloaded
from baton.gateway.request.connections import Connections
from baton.gateway.request.role_change import switch_role, switchable
from baton.gateway.text.model import ServedModel, read_served_model
from baton.protos.internal.v1 import decode_pb2_grpc, node_pb2, node_pb2_grpc, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.guard import OpenGuard
from baton.rpc.secure_server import Protection
from baton.rpc.server import GrpcServer
from baton.security.certificates import Authority
from baton.security.roles import Role
from baton.security.tls import InternalTls
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.unit.gateway.fleets import DECODE, PREFILL, SmallFleet
from tests.unit.gateway.scripted_nodes import ScriptedNode
from tests.unit.security.settings import TlsSettings

BOUND_S = 60


def refusal(fleet: SmallFleet, name: str, role: node_status_pb2.Role.ValueType, *, force: bool = False) -> BatonError:
    with pytest.raises(BatonError) as caught:
        switchable(fleet, name, role, force=force)
    return caught.value


def test_a_node_is_found_by_its_name_and_by_its_address() -> None:
    fleet = SmallFleet(1, 2)
    for name in ("node-22", "d2"):
        assert switchable(fleet, name, PREFILL, force=False) is fleet.decodes["d2"]
    unknown = refusal(fleet, "d3", PREFILL)
    assert isinstance(unknown, InvalidRequest)
    assert unknown.allowed == ("node-11", "node-21", "node-22")
    fleet.decodes["d1"].status.info.name = "node-22"
    assert refusal(fleet, "node-22", PREFILL).message == "2 nodes have that name: 'node-22'"


def test_the_last_usable_node_of_a_role_keeps_it_unless_forced() -> None:
    fleet = SmallFleet(1, 2)
    fleet.decodes["d1"].status.draining = True
    refused = refusal(fleet, "d2", PREFILL)
    assert (type(refused), refused.message) == (InvalidRequest, "node-22 is the last usable decode node")
    assert switchable(fleet, "d2", PREFILL, force=True) is fleet.decodes["d2"]
    assert switchable(fleet, "d2", DECODE, force=False) is fleet.decodes["d2"], "it has that role already"


def test_one_node_switches_at_a_time() -> None:
    fleet = SmallFleet(2, 2)
    fleet.prefills["p1"].status.next_role = DECODE
    assert isinstance(refusal(fleet, "d2", PREFILL), Overloaded)
    assert switchable(fleet, "p1", DECODE, force=False) is fleet.prefills["p1"], "its switch is followed"


def test_a_node_that_is_not_reachable_and_a_role_that_none_has_are_refused() -> None:
    fleet = SmallFleet(1, 2)
    fleet.lose("d2")
    assert isinstance(refusal(fleet, "d2", PREFILL), NoNode)
    assert isinstance(refusal(fleet, "d1", node_status_pb2.ROLE_GATEWAY), InvalidRequest)


class Switching(ScriptedNode):
    """A node that has whatever role it is given, whether its certificate allows it or not."""

    def __init__(
        self, role: node_status_pb2.Role.ValueType, incarnation: int, model: node_status_pb2.ModelIdentity
    ) -> None:
        super().__init__(role, incarnation, model)
        self._changed = asyncio.Condition()

    async def become(self, role: node_status_pb2.Role.ValueType) -> None:
        self.status.info.role = role
        self.status.info.incarnation += 100
        async with self._changed:
            self._changed.notify_all()

    async def Watch(self, request: node_pb2.WatchRequest, context: object) -> AsyncIterator[node_status_pb2.NodeStatus]:  # noqa: N802
        while True:
            sent = self.status.info.incarnation
            yield self.status
            async with self._changed:
                while self.status.info.incarnation == sent:
                    await self._changed.wait()

    async def SwitchRole(  # type: ignore[override]  # noqa: N802
        self, request: node_pb2.SwitchRoleRequest, context: object
    ) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        yield node_status_pb2.RoleSwitchProgress(phase=node_status_pb2.SWITCH_PHASE_DRAINING)
        await self.become(request.role)
        yield node_status_pb2.RoleSwitchProgress(phase=node_status_pb2.SWITCH_PHASE_DONE, info=self.status.info)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return read_served_model(DEMO_MODELS / "llama", None)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    authority = Authority.new(days=1)
    authority.pair.write(folder, "ca")
    for role in Role:
        authority.for_role(role, lifetime=timedelta(days=1)).write(folder, role)
    return folder


@asynccontextmanager
async def connected(
    model: ServedModel, certs: Path, *nodes: tuple[node_status_pb2.Role.ValueType, str]
) -> AsyncIterator[tuple[Connections, list[Switching]]]:
    """A gateway's connections to nodes that are listed for these roles, and show the certificates of these names."""
    async with AsyncExitStack() as stack:
        made = []
        listed: dict[node_status_pb2.Role.ValueType, list[str]] = {PREFILL: [], DECODE: []}
        for number, (role, name) in enumerate(nodes):
            tls = InternalTls.read(TlsSettings.of(certs, name), None)
            assert tls is not None
            protection = Protection(tls.server(), OpenGuard())
            server = await stack.enter_async_context(GrpcServer("127.0.0.1:0", advertise=None, protection=protection))
            node = Switching(role, 11 + number, model.identity)
            node.address = node.status.info.address = server.address
            for add in (
                node_pb2_grpc.add_NodeServicer_to_server,
                decode_pb2_grpc.add_DecodeServicer_to_server,
                prefill_pb2_grpc.add_PrefillServicer_to_server,
            ):
                add(node, server.grpc)
            await server.start(())
            listed[role].append(server.address)
            made.append(node)
        flags = {
            "model": DEMO_MODELS / "llama",
            "prefill": ",".join(listed[PREFILL]),
            "decode": ",".join(listed[DECODE]),
        }
        flags |= {"tls-cert": certs / "gateway.crt", "tls-key": certs / "gateway.key", "tls-ca": certs / "ca.crt"}
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        connections = await stack.enter_async_context(
            Connections(read_settings(GatewaySettings, "gateway", arguments), model)
        )
        async with asyncio.timeout(BOUND_S):
            yield connections, made


async def test_a_node_with_a_certificate_for_both_roles_is_used_in_either(model: ServedModel, certs: Path) -> None:
    nodes = ((PREFILL, "prefill"), (DECODE, "decode"), (DECODE, "node"))
    async with connected(model, certs, *nodes) as (connections, (_, _, switching)):
        fleet = connections.fleet
        await connections.until(lambda: [node.open for node in fleet.nodes()] == [True] * 3)
        for role, prefills, decodes in ((PREFILL, 2, 1), (DECODE, 1, 2)):
            name = switching.status.info.name
            phases = [each.phase async for each in switch_role(connections, name, role, grace_s=None)]
            assert phases == [node_status_pb2.SWITCH_PHASE_DRAINING, node_status_pb2.SWITCH_PHASE_DONE]
            assert [len(fleet.prefills), len(fleet.decodes)] == [prefills, decodes]
            assert all(node.open for node in fleet.nodes())
            assert connections.client(role, switching.address) is not None


async def test_a_node_that_takes_a_role_that_its_certificate_forbids_is_not_used(
    model: ServedModel, certs: Path
) -> None:
    async with connected(model, certs, (PREFILL, "prefill"), (DECODE, "decode"), (DECODE, "decode")) as (
        connections,
        (_, _, liar),
    ):
        fleet = connections.fleet
        await connections.until(lambda: [node.open for node in fleet.nodes()] == [True] * 3)
        await liar.become(PREFILL)
        forbidden = "it is a prefill node, not a decode node, and cannot be reached as one: "
        await connections.until(lambda: forbidden in fleet.explain())
        assert not fleet.decodes[liar.address].open
        assert len(fleet.prefills) == 1
        await liar.become(DECODE)
        await connections.until(lambda: fleet.decodes[liar.address].open)


async def test_a_node_is_not_taken_from_the_list_of_another_role_than_its_certificate_s(
    model: ServedModel, certs: Path
) -> None:
    async with connected(model, certs, (DECODE, "prefill"), (DECODE, "decode")) as (connections, (wrong, _)):
        fleet = connections.fleet
        await connections.until(lambda: any(node.open for node in fleet.nodes()))
        await connections.until(lambda: not fleet.decodes[wrong.address].never_connected)
        assert not fleet.decodes[wrong.address].open
