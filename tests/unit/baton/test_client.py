"""The client as its users meet it: targets, options, refusals that are retried, and typed errors with a cure."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.client.client import DEFAULT_TARGET, AsyncClient
from baton.core.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
)
from baton.protos.v1 import common_pb2, generation_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.channels import SHORT_ATTEMPT_S
from baton.rpc.server import GrpcServer
from baton.rpc.status import abort
from tests.link import Link
from tests.tcp_server import tcp_server

SOON_S = 0.02
NOBODY = "127.0.0.1:9"


class Refusing(generation_pb2_grpc.GenerationServicer):
    """A gateway that first answers each call with these errors, one a call, and then serves."""

    def __init__(self, refusals: Sequence[BatonError]) -> None:
        self.refusals = list(refusals)
        self.ids: list[str] = []

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        self.ids.append(request.request_id)
        if self.refusals:
            await abort(context, self.refusals.pop(0), request_id=request.request_id)
        await context.write(pb.GenerateResponse(text="served"))
        end = common_pb2.FINISH_REASON_STOP
        await context.write(
            pb.GenerateResponse(finish_reason=end, receipt=common_pb2.Receipt(path=common_pb2.PATH_LOCAL))
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse]
    ) -> pb.TokenizeResponse:
        if self.refusals:
            await abort(context, self.refusals.pop(0))
        if request.text == "for ever":
            await asyncio.Event().wait()
        return pb.TokenizeResponse(token_ids=[1])


@asynccontextmanager
async def refusing(*refusals: BatonError) -> AsyncIterator[tuple[str, Refusing]]:
    service = Refusing(refusals)  # type: ignore[abstract]  # clients call two methods
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        await server.start([])
        yield server.address, service


@pytest.fixture
async def no_gateway() -> AsyncIterator[str]:
    """The address of a server without the Generation service, such as a node."""
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        await server.start([])
        yield server.address


# ---- targets


@pytest.mark.parametrize(
    "addresses", [{"target": ""}, {"target": 7000}, {"target": "a:1,"}, {"addresses": "a:1"}, {"addresses": [" "]}]
)
def test_what_is_no_address_is_a_config_error(addresses: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"allowed: (host:port|a list)"):
        AsyncClient(**addresses)


@pytest.mark.parametrize("target", ["http://127.0.0.1:8000", "HTTPS://gateway:443", "a:1,http://b:1"])
def test_an_address_of_http_is_refused_with_the_form_of_grpc_addresses(target: str) -> None:
    with pytest.raises(ConfigError, match="use host:port, without http://; gRPC has a port of its own"):
        AsyncClient(target)


async def test_the_environment_may_name_several_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    async with refusing() as (address, _):
        monkeypatch.setenv("BATON_TARGET", f"{NOBODY}, {address}")
        async with AsyncClient() as client:
            assert (await client.tokenize("x"), client.target) == ([1], address)


async def test_a_gateway_whose_port_is_bound_may_answer_late() -> None:
    """As one that has just started does. Only if there are others, the client soon tries another one."""
    async with refusing() as (address, _), Link("late", address) as late:
        late.silence("both")
        async with AsyncClient(late.address) as alone, AsyncClient(addresses=[late.address, address]) as one_of_two:
            asking = asyncio.create_task(alone.tokenize("x"))
            assert await one_of_two.tokenize("x") == [1]
            assert one_of_two.target == address
            await asyncio.wait([asking], timeout=SHORT_ATTEMPT_S)
            assert not asking.done()
            late.heal()
            assert await asking == [1]


async def test_a_call_without_end_has_no_deadline() -> None:
    async with refusing() as (address, _), AsyncClient(address, unary_timeout_s=math.inf) as client:
        assert await client.tokenize("x") == [1]


async def test_without_a_target_the_environment_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TARGET", NOBODY)
    async with AsyncClient() as client:
        assert client.target == NOBODY
    monkeypatch.delenv("BATON_TARGET")
    async with AsyncClient() as client:
        assert client.target == DEFAULT_TARGET == "127.0.0.1:7000"


async def test_the_address_of_a_node_is_an_error_for_every_timeout(no_gateway: str) -> None:
    for timeout_s in (None, 1e10, math.inf):
        async with AsyncClient(no_gateway) as client:
            with pytest.raises(NoNode, match="is not a gateway; give the address of a gateway"):
                await client.complete("x", timeout_s=timeout_s)


# ---- options


async def test_a_misspelt_option_names_the_allowed_ones() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(TypeError, match=r"no option 'request'; allowed: add_special_tokens, .*request_id"):
            await client.complete("x", request="mine")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match=r"no option 'tools'; allowed: add_special_tokens"):
            client.generate("x", tools=[])  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"no option 'tool'; allowed: .*tool_choice, tools"):
            client.stream_chat([], tool=[])  # type: ignore[call-arg]


async def test_a_sampling_parameter_among_the_options_is_sent_to_its_place() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(TypeError, match=r"'max_tokens'; give it as sampling: \{\"max_tokens\": \.\.\.\}"):
            await client.complete("x", max_tokens=5)  # type: ignore[call-overload]


async def test_text_that_is_not_unicode_is_an_invalid_request() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="UTF-8") as caught:
            await client.complete("an argument in Latin-1: \udce9")
        assert caught.value.field == "prompt"
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("x", request_id="\ud800")
        assert caught.value.field == "request_id"
        with pytest.raises(InvalidRequest):
            await client.tokenize("\ud800")


async def test_a_priority_that_is_no_32_bit_number_is_an_invalid_request() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match="priority is 2147483648") as caught:
            await client.complete("x", priority=2**31)
    assert caught.value.field == "priority"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"ttft_s": "soon"}, "ttft_s"),
        ({"n": "3"}, "n"),
        ({"n": 0}, "n"),
        ({"session_id": 5}, "session_id"),
    ],
)
async def test_an_option_of_another_type_is_an_invalid_request(options: dict[str, Any], field: str) -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest, match=f"^{field} is ") as caught:
            await client.complete("x", **options)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", [b"text", None, ["text"], [-1]])
async def test_a_prompt_is_text_or_token_ids(prompt: Any) -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(prompt)
    assert caught.value.field == "prompt"


async def test_sampling_that_is_no_mapping_is_named() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(TypeError, match=r"sampling is \['hot'\]; allowed: SamplingParams"):
            await client.complete("x", ["hot"])  # type: ignore[call-overload]


# ---- event loops


def test_a_client_made_outside_of_a_loop_serves_one_loop() -> None:
    client = AsyncClient(NOBODY)

    async def ask() -> None:
        await client.tokenize("x")

    with pytest.raises(NoNode, match="cannot reach"):
        asyncio.run(ask())
    with pytest.raises(RuntimeError, match="used in another event loop; make one in each loop"):
        asyncio.run(ask())


async def test_a_closed_client_says_so() -> None:
    client = AsyncClient(NOBODY)
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.tokenize("x")
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.complete("x")


# ---- refusals


@pytest.mark.parametrize("kind", [Overloaded, NoNode, Draining])
async def test_a_refusal_with_a_time_is_retried_then_with_the_same_id(kind: type[BatonError]) -> None:
    refusals = [kind("come again", retry_after_s=SOON_S) for _ in range(2)]
    async with refusing(*refusals) as (address, service), AsyncClient(address) as client:
        whole = await client.complete("x", timeout_s=60.0)
        assert (whole.text, service.ids) == ("served", [whole.request_id] * 3)


async def test_calls_that_generate_nothing_are_retried_too() -> None:
    refusal = Overloaded("come again", retry_after_s=SOON_S)
    async with refusing(refusal) as (address, _), AsyncClient(address) as client:
        assert await client.tokenize("x") == [1]


async def test_a_refusal_that_outlives_the_deadline_is_raised_at_once() -> None:
    refusal = Overloaded("come again", retry_after_s=3600.0)
    async with refusing(refusal) as (address, service), AsyncClient(address) as client:
        with pytest.raises(Overloaded, match="come again") as caught:
            await client.complete("x", timeout_s=60.0, request_id="mine")
        assert (caught.value.request_id, service.ids) == ("mine", ["mine"])


@pytest.mark.parametrize(
    "refusal", [Overloaded("no time"), InternalError("not a refusal", retry_after_s=SOON_S)], ids=["untimed", "error"]
)
async def test_other_errors_are_raised_at_once(refusal: BatonError) -> None:
    async with refusing(refusal) as (address, service), AsyncClient(address) as client:
        with pytest.raises(type(refusal)):
            await client.complete("x")
        assert len(service.ids) == 1


async def test_a_client_without_retries_raises_the_refusal() -> None:
    refusal = Overloaded("come again", retry_after_s=SOON_S)
    async with refusing(refusal) as (address, _), AsyncClient(address, retry_s=0.0) as client:
        with pytest.raises(Overloaded):
            await client.complete("x")


async def test_an_error_before_any_gateway_answered_has_the_id() -> None:
    async with AsyncClient(NOBODY) as client:
        with pytest.raises(NoNode, match="cannot reach") as caught:
            await client.complete("x", request_id="mine")
        assert caught.value.request_id == "mine"


async def test_an_http_port_is_named_as_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await reader.read()  # until the client hangs up, so that no reset overtakes the answer

    async with tcp_server(answer) as port, AsyncClient(f"127.0.0.1:{port}", retry_s=0.0) as client:
        speaks_http = rf"cannot reach 127.0.0.1:{port}: what answers there speaks HTTP/1; gRPC has"
        with pytest.raises(NoNode, match=speaks_http):
            await client.complete("x")


async def test_a_call_that_generates_nothing_has_a_timeout() -> None:
    async with refusing() as (address, _), AsyncClient(address, unary_timeout_s=0.05) as client:
        with pytest.raises(DeadlineExceeded):
            await client.tokenize("for ever")
