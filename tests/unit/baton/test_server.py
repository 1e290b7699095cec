"""Every server of ours answers bursts, refuses malformed messages, lists its health and describes itself."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import ConfigError, InternalError, InvalidRequest, NoNode, PeerRefused
from baton.node import waiting
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import MESSAGE_BYTES_MAX, connect
from baton.rpc.reflection import V1, V1_ALPHA
from baton.rpc.server import GrpcServer, ListenAddress
from baton.rpc.status import from_rpc_error
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings

Context = grpc.aio.ServicerContext[Any, Any]


class Echo(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """One method of each kind: a message for a message, a stream for a message, a stream for a stream."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: Context) -> node_status_pb2.PeerState:  # noqa: N802
        return node_status_pb2.PeerState(address=request.decode_address)

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Context) -> prefill_pb2.PoolResponse:  # noqa: N802
        return prefill_pb2.PoolResponse()

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        try:
            while True:
                yield prefill_pb2.PrefillEvent()
        finally:
            self.ended.set()

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        async for request in requests:
            yield decode_pb2.SessionResponse(released=decode_pb2.Released(key=request.submit.key))

    def Pair(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        raise NotImplementedError


@pytest.fixture
async def echo() -> AsyncIterator[tuple[grpc.aio.Channel, Echo]]:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        service = Echo()
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)
        await server.start(["baton.internal.v1.Prefill", "baton.internal.v1.Decode"])
        async with connect(server.address) as channel:
            yield channel, service


async def test_every_call_of_a_large_burst_is_answered() -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        await server.start([])
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answers = await asyncio.gather(*(check(health_pb2.HealthCheckRequest()) for _ in range(4000)))
    assert {answer.status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}


async def test_a_message_with_more_fields_than_requests_need_is_not_parsed() -> None:
    bounded = GrpcServer("127.0.0.1:0", advertise=None, bounded=True)
    async with bounded as server, connect(server.address) as channel:
        await server.start([])
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x00" * 40_000)  # the field `service`, again and again
    typed = from_rpc_error(caught.value)
    assert isinstance(typed, InvalidRequest)
    assert "more than 16384 fields" in str(typed)


LIMIT_BYTES = 1000


@pytest.fixture
async def limited() -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer("127.0.0.1:0", advertise=None, receive_bytes_max=LIMIT_BYTES)
    decode_pb2_grpc.add_DecodeServicer_to_server(Echo(), server.grpc)
    async with server, connect(server.address) as channel:
        await server.start([])
        yield channel


@pytest.mark.parametrize("method", ["/grpc.health.v1.Health/Check", "/baton.internal.v1.Decode/Session"])
async def test_a_message_over_the_server_s_limit_is_refused_with_details(
    limited: grpc.aio.Channel, method: str
) -> None:
    calls: Any = {"Check": limited.unary_unary, "Session": limited.stream_unary}[method.rpartition("/")[2]]
    message = bytes(LIMIT_BYTES + 1)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await calls(method)(iter([message]) if "Session" in method else message)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    typed = from_rpc_error(refused.value)
    assert isinstance(typed, InvalidRequest)
    assert (typed.field, typed.value, typed.allowed) == ("message", "1001", ("up to 1000 bytes",))


async def test_a_message_that_grpc_itself_refuses_is_no_overload_to_our_clients(limited: grpc.aio.Channel) -> None:
    for size_bytes in (2 * LIMIT_BYTES + 1, MESSAGE_BYTES_MAX + 1):  # for the server, and for the client's own gRPC
        call: Any = limited.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(bytes(size_bytes))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        typed = from_rpc_error(refused.value)
        assert (type(typed), typed.field, typed.value) == (InvalidRequest, "message", str(size_bytes))


async def test_an_answer_that_is_too_large_for_the_client_is_not_its_fault() -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        await server.start([])
        options = [("grpc.max_receive_message_length", 1)]
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"")
    assert isinstance(from_rpc_error(refused.value), InternalError)


async def test_the_largest_limit_that_the_settings_allow_is_one_of_grpc() -> None:
    most = int(GatewaySettings(http_body_mib=4096).http_body_mib * MIB)
    async with GrpcServer("127.0.0.1:0", advertise=None, receive_bytes_max=most) as server, connect(server.address):
        await server.start([])


MALFORMED = b"\x0a\xff\xff"


async def send(channel: Any, method: str, kind: str) -> None:
    """Sends a malformed message, after a good one where the method takes a stream."""
    if kind == "message":
        await channel.unary_unary(method)(MALFORMED)
    elif kind == "stream of responses":
        await channel.unary_stream(method)(MALFORMED).read()
    else:
        call = channel.stream_stream(method)()
        await call.write(decode_pb2.SessionRequest().SerializeToString())
        await call.read()
        await call.write(MALFORMED)
        await call.read()


async def refusal(channel: grpc.aio.Channel, method: str, kind: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(channel, method, kind)
    return caught.value


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/baton.internal.v1.Prefill/Connect", "message"),
        ("/baton.internal.v1.Prefill/Prefill", "stream of responses"),
        ("/baton.internal.v1.Decode/Session", "stream of both"),
        ("/grpc.health.v1.Health/Check", "message"),
    ],
)
async def test_a_malformed_message_is_an_invalid_argument_with_our_detail(
    echo: tuple[grpc.aio.Channel, Echo], method: str, kind: str
) -> None:
    error = await refusal(echo[0], method, kind)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    typed = from_rpc_error(error)
    assert isinstance(typed, InvalidRequest)
    assert f"3 bytes for {method} cannot be parsed" in str(typed)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.binary(max_size=60))
def test_random_bytes_never_get_unknown(data: bytes) -> None:
    async def answer() -> grpc.StatusCode:
        async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
            prefill_pb2_grpc.add_PrefillServicer_to_server(Echo(), server.grpc)
            await server.start([])
            untyped: Any = channel
            code: grpc.StatusCode = await untyped.unary_unary("/baton.internal.v1.Prefill/Connect")(data).code()
            return code

    try:
        prefill_pb2.ConnectRequest.FromString(data)
        expected = grpc.StatusCode.OK
    except DecodeError:
        expected = grpc.StatusCode.INVALID_ARGUMENT
    assert asyncio.run(answer()) is expected


async def test_a_handler_ends_with_its_call(echo: tuple[grpc.aio.Channel, Echo]) -> None:
    channel, service = echo
    call = prefill_pb2_grpc.PrefillStub(channel).Prefill(prefill_pb2.PrefillRequest())
    await call.read()
    call.cancel()
    await asyncio.wait_for(service.ended.wait(), 60)


async def test_streams_pass_through(echo: tuple[grpc.aio.Channel, Echo]) -> None:
    async def submissions() -> AsyncIterator[decode_pb2.SessionRequest]:
        for key in range(5):
            yield decode_pb2.SessionRequest(submit=decode_pb2.SubmitRequest(key=key))

    session = decode_pb2_grpc.DecodeStub(echo[0]).Session(submissions())
    assert [answer.released.key async for answer in session] == list(range(5))


async def test_an_unknown_method_is_unimplemented(echo: tuple[grpc.aio.Channel, Echo]) -> None:
    error = await refusal(echo[0], "/baton.internal.v1.Prefill/Nothing", "message")
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_lists_every_service(echo: tuple[grpc.aio.Channel, Echo]) -> None:
    listing = echo[0].unary_unary(
        "/grpc.health.v1.Health/List",
        request_serializer=health_pb2.HealthListRequest.SerializeToString,  # type: ignore[attr-defined]
        response_deserializer=health_pb2.HealthListResponse.FromString,  # type: ignore[attr-defined]
    )
    statuses = (await listing(health_pb2.HealthListRequest())).statuses  # type: ignore[attr-defined]
    assert set(statuses) == {
        "",
        "baton.internal.v1.Prefill",
        "baton.internal.v1.Decode",
        "grpc.health.v1.Health",
        V1,
        V1_ALPHA,
    }
    assert statuses[""].status == health_pb2.HealthCheckResponse.SERVING
    assert statuses["baton.internal.v1.Decode"].status == health_pb2.HealthCheckResponse.NOT_SERVING


SERVICES = {"baton.internal.v1.Prefill", "baton.internal.v1.Decode", "grpc.health.v1.Health", V1, V1_ALPHA}


async def test_reflection_v1alpha_describes_the_services_to_grpcios_client() -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        await server.start(["baton.internal.v1.Prefill", "baton.internal.v1.Decode"])

        def describe() -> tuple[set[str], list[str]]:
            with grpc.insecure_channel(server.address) as channel:
                database = ProtoReflectionDescriptorDatabase(channel)
                pool = descriptor_pool.DescriptorPool(database)
                services = set(database.get_services())
                return services, [method.name for method in pool.FindServiceByName("baton.internal.v1.Prefill").methods]

        services, methods = await asyncio.to_thread(describe)
    assert services == SERVICES
    assert methods == ["Prefill", "Connect", "Pool"]


@pytest.mark.parametrize(
    ("symbol", "found"),
    [
        ("baton.internal.v1.Prefill", True),
        ("baton.internal.v1.Prefill.Connect", True),
        ("baton.internal.v1.PrefillRequest", True),
        ("baton.internal.v1.Prefill.Nothing", False),
        ("baton.v1.Nothing", False),
        ("", False),
    ],
)
async def test_reflection_finds_services_methods_and_messages(
    echo: tuple[grpc.aio.Channel, Echo], symbol: str, found: bool
) -> None:
    channel: Any = echo[0]
    call = channel.stream_stream(f"/{V1}/ServerReflectionInfo")()
    await call.write(ServerReflectionRequest(file_containing_symbol=symbol).SerializeToString())
    response = ServerReflectionResponse.FromString(await call.read())
    assert bool(response.file_descriptor_response.file_descriptor_proto) is found
    await call.done_writing()


async def test_reflection_v1_describes_itself_with_its_own_names(echo: tuple[grpc.aio.Channel, Echo]) -> None:
    """A client that has only what the server sends: the messages are built from the descriptors of v1."""
    pool = descriptor_pool.DescriptorPool()
    channel: Any = echo[0]
    call = channel.stream_stream(f"/{V1}/ServerReflectionInfo")()
    await call.write(ServerReflectionRequest(file_containing_symbol=V1).SerializeToString())
    response = ServerReflectionResponse.FromString(await call.read())
    for data in response.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    assert pool.FindServiceByName(V1).methods[0].input_type.full_name == "grpc.reflection.v1.ServerReflectionRequest"
    request: Any = GetMessageClass(pool.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionRequest"))
    answer: Any = GetMessageClass(pool.FindMessageTypeByName("grpc.reflection.v1.ServerReflectionResponse"))
    await call.write(request(list_services="").SerializeToString())
    listed = answer.FromString(await call.read()).list_services_response
    assert {service.name for service in listed.service} == SERVICES
    await call.done_writing()


class Failing(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Fails in all three kinds of methods; where there are several messages, after the first one."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: Context) -> node_status_pb2.PeerState:  # noqa: N802
        raise self.error

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Context) -> prefill_pb2.PoolResponse:  # noqa: N802
        raise self.error

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent()
        raise self.error

    async def Session(  # type: ignore[override]  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> None:
        await anext(aiter(requests))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fail())

    def Pair(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        raise NotImplementedError

    async def _fail(self) -> None:
        raise self.error


async def read_all(channel: Any, method: str) -> None:
    """Sends one empty message, and reads until the call ends."""
    path = f"/baton.internal.v1.{method}"
    if method == "Prefill/Connect":
        await channel.unary_unary(path)(b"")
    elif method == "Prefill/Prefill":
        async for _ in channel.unary_stream(path)(b""):
            pass
    else:
        call = channel.stream_stream(path)()
        await call.write(b"")
        await call.read()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (NoNode("gone"), grpc.StatusCode.UNAVAILABLE, "gone"),
        (KeyError("layout"), grpc.StatusCode.INTERNAL, "failed: KeyError: 'layout'; see the server's log"),
        (TimeoutError(), grpc.StatusCode.DEADLINE_EXCEEDED, "did not get the next message in time"),
    ],
)
@pytest.mark.parametrize("method", ["Prefill/Connect", "Prefill/Prefill", "Decode/Session"])
async def test_whatever_a_handler_raises_becomes_a_status_of_ours(
    method: str, error: Exception, code: grpc.StatusCode, message: str
) -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        service = Failing(error)
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server.grpc)
        decode_pb2_grpc.add_DecodeServicer_to_server(service, server.grpc)
        await server.start([])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(channel, method)
    assert caught.value.code() is code
    assert message in str(from_rpc_error(caught.value))
    assert from_rpc_error(caught.value).reason != ""


def requests_alive(kind: str) -> list[object]:
    return [each for each in gc.get_objects() if type(each).__name__ == kind]


@pytest.mark.parametrize(("method", "kind"), [("Connect", "ConnectRequest"), ("Prefill", "PrefillRequest")])
async def test_a_call_that_has_failed_keeps_no_request(method: str, kind: str) -> None:
    """gRPC keeps its error until the collector comes, which is off here."""
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        prefill_pb2_grpc.add_PrefillServicer_to_server(Failing(NoNode("gone")), server.grpc)
        await server.start([])
        gc.collect()
        gc.disable()
        others = {id(each): each for each in requests_alive(kind)}  # that other tests of this process keep
        try:
            with pytest.raises(grpc.aio.AioRpcError):
                await read_all(channel, f"Prefill/{method}")
            freed = await waiting.until(
                lambda: all(id(each) in others for each in requests_alive(kind)), timeout_s=60.0
            )
            assert freed  # the call ends a moment after its status
        finally:
            gc.enable()


async def test_a_stream_without_a_message_gets_a_status_of_ours() -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        decode_pb2_grpc.add_DecodeServicer_to_server(Failing(NoNode("gone")), server.grpc)
        await server.start([])
        untyped: Any = channel
        call = untyped.stream_stream("/baton.internal.v1.Decode/Session")()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "the stream of /baton.internal.v1.Decode/Session ended before the next message" in str(
        from_rpc_error(caught.value)
    )


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "", "a b", "unix:/tmp", "a\0b", "\u2028"])
def test_a_name_that_no_resolver_takes_is_no_address(host: str) -> None:
    with pytest.raises(ConfigError, match=r"listen is .*allowed: host:port"):
        ListenAddress.parse(f"{host}:1", field="listen")


@pytest.mark.parametrize("port", ["²", "٣", "65536", "-1", "", "1" * 5000, " 1"])
def test_a_port_that_is_no_number_up_to_65535_is_no_address(port: str) -> None:
    with pytest.raises(ConfigError, match=r"listen is .*allowed: host:port"):
        ListenAddress.parse(f"127.0.0.1:{port}", field="listen")


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", "[::1]:7000", "gateway.example.org.:1", "bücher.example:65535", "a_b:1"]
)
def test_addresses_of_every_kind_are_taken(text: str) -> None:
    where = ListenAddress.parse(text, field="listen")
    assert f"{where.host}:{where.port}" == text


@pytest.mark.parametrize(
    ("method", "now"),
    [
        ("baton.v1.Node/Watch", "baton.internal.v1.Node/Watch"),
        ("baton.v1.Decode/Pair", "baton.internal.v1.Decode/Pair"),
        ("baton.v1.Prefill/Connect", "baton.internal.v1.Prefill/Connect"),
        ("baton.v1.Generation/ClusterStatus", "baton.v1.Operations/ClusterStatus"),
    ],
)
async def test_a_process_of_an_older_release_is_told_what_to_do(method: str, now: str) -> None:
    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        await server.start([])
        untyped: Any = channel
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await untyped.unary_unary(f"/{method}")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    typed = from_rpc_error(caught.value)
    assert isinstance(typed, PeerRefused)
    assert now in typed.message
    assert "docs/upgrades.md" in typed.cure
