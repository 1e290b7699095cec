"""Every RPC of every service has a row in the table, and a server admits the callers that the row names, and nobody
else."""

import importlib
import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

import baton.protos as protos
from baton.core.errors import PermissionDenied
from baton.gateway.http.routes import ROUTES
from baton.rpc.channels import channel_options, connect
from baton.rpc.guard import Authorize, CertificateGuard, ClientGuard, Guard
from baton.rpc.reflection import V1
from baton.rpc.status import from_rpc_error
from baton.security.authenticator import Authenticator
from baton.security.authorize import OPERATOR_PATHS, TABLE, UI_FILES, Right, check, rights_for, rights_for_path
from baton.security.certificates import Authority
from baton.security.exposure import is_loopback
from baton.security.keys import entry, new_key
from baton.security.roles import Role
from baton.security.tls import Dial, InternalTls
from tests.unit.security.settings import AuthenticatorSettings, TlsSettings

GATEWAYS = (
    "baton.v1.Generation",
    "baton.v1.Operations",
    "vllm.grpc.engine.VllmEngine",
    "inference.GRPCInferenceService",
)
HEALTH, REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
LIFETIME = timedelta(days=1)


def methods() -> dict[str, MethodDescriptor]:
    """All methods of our own services, of the vLLM engine's, and of health and reflection, by their path."""
    names = [
        module.name
        for module in pkgutil.walk_packages(protos.__path__, "baton.protos.")
        if module.name.endswith("_pb2")
    ]
    files = [importlib.import_module(name) for name in names] + [vllm_engine_pb2, health_pb2, reflection_pb2]
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}


METHODS = methods()
PATHS = sorted(METHODS)


def test_the_table_has_a_row_for_each_method_and_no_other() -> None:
    rows = {f"/{service}/{method}" for service, methods in TABLE.items() for method in methods}
    assert rows == {*METHODS, f"/{V1}/ServerReflectionInfo"}


def test_a_method_without_a_row_is_for_nobody() -> None:
    for method in (
        "/baton.internal.v1.Node/Explode",
        "/baton.v2.Node/Drain",
        "",
        "//",
        "/baton.internal.v1.Node/Drain/",
    ):
        with pytest.raises(PermissionDenied, match="allowed: nobody"):
            check(method, rights_for(method), frozenset(Right))


@pytest.mark.parametrize(
    ("method", "only"),
    [
        ("/baton.internal.v1.Decode/Session", {"gateway"}),
        ("/baton.internal.v1.Decode/Pair", {"prefill"}),
        ("/baton.internal.v1.Prefill/Prefill", {"gateway"}),
        ("/baton.internal.v1.Prefill/Connect", {"gateway"}),
        ("/baton.internal.v1.Node/Drain", {"operator"}),
        ("/baton.internal.v1.Node/Watch", {"gateway", "operator"}),
        ("/baton.internal.v1.Node/SwitchRole", {"gateway", "operator"}),
        ("/baton.v1.Operations/SwitchNodeRole", {"operator"}),
        ("/baton.v1.Operations/ClusterStatus", {"operator"}),
        ("/baton.v1.Operations/ClusterView", {"operator"}),
        ("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents", {"operator"}),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", {"operator"}),
    ],
)
def test_what_matters_most_is_for_whom_it_should_be(method: str, only: set[str]) -> None:
    assert rights_for(method) == only


def _answering() -> dict[str, Any]:
    """A handler for each method, by service; it answers one empty message."""

    async def one(request: Any, context: Any) -> bytes:
        return b""

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b""

    made: dict[str, Any] = {}
    for method in METHODS.values():
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[method.client_streaming, method.server_streaming]
        handler: Any = make(many if method.server_streaming else one)
        made.setdefault(method.containing_service.full_name, {})[method.name] = handler
    return made


@asynccontextmanager
async def serving(guard: Guard, credentials: grpc.ServerCredentials | None) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[Authorize(guard)], options=channel_options())
    for service, handlers in _answering().items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def outcome(channel: Any, path: str, *, wait: bool = True) -> str:
    """`served`, or the name of the error.

    Args:
        wait: until the server is connected, which a busy machine needs.
    """
    method = METHODS[path]
    try:
        if method.client_streaming:
            open_call = channel.stream_stream if method.server_streaming else channel.stream_unary
            # NOTE: writes nothing, since a client that writes to a call that has ended may see INTERNAL instead.
            call = open_call(path)(wait_for_ready=wait)
        else:
            call = (channel.unary_stream if method.server_streaming else channel.unary_unary)(path)(
                b"", wait_for_ready=wait
            )
        if method.server_streaming:
            assert [each async for each in call] == [b""]
        else:
            assert await call == b""
    except grpc.aio.AioRpcError as error:
        return type(from_rpc_error(error)).__name__
    return "served"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    authority = Authority.new(days=1)
    authority.pair.write(folder, "ca")
    for role in Role:
        authority.for_role(role, lifetime=LIFETIME).write(folder, role)
    authority.for_hosts(["127.0.0.1"], lifetime=LIFETIME).write(folder, "host")
    return folder


def tls_of(folder: Path, name: str) -> InternalTls:
    tls = InternalTls.read(TlsSettings.of(folder, name), None)
    assert tls is not None
    return tls


@pytest.mark.parametrize("role", list(Role))
async def test_a_certificate_opens_the_methods_of_its_role_and_no_other(folder: Path, role: Role) -> None:
    rights = {Right.PREFILL, Right.DECODE} if role is Role.NODE else {Right(role)}
    async with (
        serving(CertificateGuard(), tls_of(folder, "decode").server()) as address,
        connect(address, dial=tls_of(folder, role).to_role(Role.DECODE)) as channel,
    ):
        for path in PATHS:
            allowed = rights_for(path) & {Right.ANYONE, *rights}
            assert await outcome(channel, path) == ("served" if allowed else "PermissionDenied"), path


async def test_a_key_opens_what_its_owner_may_do_and_nothing_of_the_nodes(tmp_path: Path) -> None:
    keys = {"alice": new_key(), "admin": new_key(), "": ""}
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(name, keys[name], operator=name == "admin") for name in ("alice", "admin")))
    held = {"alice": {Right.CLIENT}, "admin": {Right.CLIENT, Right.OPERATOR}, "": set[Right]()}
    async with serving(ClientGuard(Authenticator(AuthenticatorSettings(api_keys=file))), None) as address:
        for name, rights in held.items():
            dial = Dial(metadata=(("authorization", f"Bearer {keys[name]}"),) if name else ())
            async with connect(address, dial=dial) as channel:
                for path in PATHS:
                    refusal = "PermissionDenied" if name else "Unauthenticated"
                    wanted = "served" if rights_for(path) & {Right.ANYONE, *rights} else refusal
                    assert await outcome(channel, path) == wanted, (name, path)


async def test_a_certificate_without_a_role_opens_only_what_is_for_anyone(folder: Path) -> None:
    server = tls_of(folder, "decode").server()
    # Only a client's certificate counts as one, so this one is refused before any call, like no certificate at all.
    async with (
        serving(CertificateGuard(), server) as address,
        connect(address, dial=tls_of(folder, "host").to_role(Role.DECODE)) as channel,
    ):
        assert await outcome(channel, "/baton.internal.v1.Node/Drain", wait=False) == "NoNode"


def test_paths_that_are_not_in_the_table_need_a_key() -> None:
    needed = {route.path: rights_for_path(route.path) for route in ROUTES}
    open_paths = {path for path, rights in needed.items() if Right.ANYONE in rights}
    assert open_paths == {"/", "/health", "/ready", "/version", "/docs", "/ui", *UI_FILES}
    assert {path for path, rights in needed.items() if rights == {Right.OPERATOR}} == OPERATOR_PATHS
    assert Right.ANYONE not in rights_for_path("/v1/models/../health")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("[::1]", True), ("localhost", True), ("[::ffff:127.0.0.1]", True),
        ("0.0.0.0", False), ("[::]", False), ("10.0.0.1", False), ("127.0.0.1.example.com", False), ("", False),
    ],
)  # fmt: skip
def test_only_addresses_of_this_machine_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
