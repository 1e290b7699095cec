"""The gateway's services between scripted nodes: refusals with the standard details, and calls that end early."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.client.client import AsyncClient
from baton.client.outputs import Notice, Piece
from baton.core.errors import Overloaded
from baton.gateway.grpc.call import GrpcCall
from baton.gateway.grpc.services import SERVICE_NAMES, add_services
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import ServedModel, read_served_model
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2, generation_pb2_grpc
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.channels import connect
from baton.rpc.server import GrpcServer
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes

BOUND_S = 60


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    read = read_served_model(DEMO_MODELS / "llama", None)
    yield read
    read.close()


@dataclass
class Door:
    """A gateway for one request at once; its decode node answers nothing by itself."""

    address: str
    serving: Serving
    decode: ScriptedNode


@pytest.fixture
async def door(model: ServedModel) -> AsyncIterator[Door]:
    async with scripted_nodes(model.identity) as (_, decode):
        flags = ["--model", str(DEMO_MODELS / "llama"), "--decode", decode.address, "--max-concurrent-requests", "1"]
        settings = read_settings(GatewaySettings, "gateway", flags)
        async with Connections(settings, model) as connections, GrpcServer("127.0.0.1:0", advertise=None) as server:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            serving = Serving(settings, model, connections)
            view = View(settings, serving, connections.fleet, "gateway-1")
            add_services(server, settings, serving, connections, view)
            await server.start(SERVICE_NAMES)
            yield Door(server.address, serving, decode)


async def test_an_overload_says_when_to_retry(door: Door) -> None:
    async with connect(door.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        running = stub.Generate(pb.GenerateRequest(text="a"))
        await door.decode.submission()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(pb.GenerateRequest(text="b", request_id="second"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert trailing["grpc-retry-pushback-ms"] == "1000"
        status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
        found = {detail.TypeName().rpartition(".")[2]: detail for detail in status.details}
        request_info = error_details_pb2.RequestInfo.FromString(found["RequestInfo"].value)
        assert request_info.request_id == "second"
        assert error_details_pb2.RetryInfo.FromString(found["RetryInfo"].value).retry_delay.seconds == 1
        running.cancel()


async def cancelled(door: Door) -> None:
    """Returns when the gateway has told the node that the request is over."""
    request = await asyncio.wait_for(door.decode.received.get(), BOUND_S)
    assert isinstance(request, decode_pb2.SessionRequest)
    assert request.HasField("cancel")


async def test_a_client_that_leaves_ends_its_request_at_every_door(door: Door) -> None:
    async with connect(door.address) as channel:
        own = generation_pb2_grpc.GenerationStub(channel)
        engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        prompt = vllm.TokenizedInput(input_ids=[1, 2])
        calls: list[grpc.aio.Call] = []
        for start in (
            lambda: own.Generate(pb.GenerateRequest(text="a")),
            lambda: own.Complete(pb.GenerateRequest(text="a")),
            lambda: engine.Generate(vllm.GenerateRequest(tokenized=prompt, stream=True)),
        ):
            calls.append(start())
            await door.decode.submission()
            calls[-1].cancel()
            await cancelled(door)
            assert door.serving.running == 0


async def test_the_engines_prompt_arrives_with_the_whole_context_as_limit(door: Door) -> None:
    async with connect(door.address) as channel:
        engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await engine.GetModelInfo(vllm.GetModelInfoRequest())
        call = engine.Generate(vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5, 6, 7]), stream=True))
        submission = await door.decode.submission()
        assert list(submission.prompt_token_ids) == [5, 6, 7]
        assert submission.sampling.max_tokens == info.max_context_length - 3
        call.cancel()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more", True),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01", False),
        ("junk", False),
    ],
)
async def test_a_traceparent_is_kept_if_it_is_well_formed(given: str, kept: bool) -> None:
    seen: list[bool] = []

    async def look(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        seen.append(GrpcCall(context).trace is not None)
        return b""

    async with GrpcServer("127.0.0.1:0", advertise=None) as server, connect(server.address) as channel:
        handler: Any = grpc.unary_unary_rpc_method_handler(look)
        server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Look", {"Look": handler}),))
        await server.start([])
        untyped: Any = channel
        await untyped.unary_unary("/test.Look/Look")(b"", metadata=(("traceparent", given),))
    assert seen == [kept]


class Scripted(generation_pb2_grpc.GenerationServicer):
    """A gateway that answers each request with these messages."""

    def __init__(self, *messages: pb.GenerateResponse) -> None:
        self.messages = messages
        self.requests: list[pb.GenerateRequest] = []

    async def Generate(  # type: ignore[override]  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        self.requests.append(request)
        for message in self.messages:
            await context.write(message)


@pytest.fixture
async def several() -> AsyncIterator[tuple[AsyncClient, Scripted]]:
    """A client of a gateway that gives a notice and two outputs of a chat."""
    end = {"finish_reason": common_pb2.FINISH_REASON_STOP, "receipt": common_pb2.Receipt(path=common_pb2.PATH_LOCAL)}
    call = pb.ToolCallDelta(id="c", name="f", arguments="{")
    service = Scripted(  # type: ignore[abstract]  # clients call one method
        pb.GenerateResponse(notice="the decode node was lost"),
        pb.GenerateResponse(index=1, text="b", chat=pb.ChatDelta(content="b")),
        pb.GenerateResponse(index=0, text="a", chat=pb.ChatDelta(reasoning="a", tool_calls=[call])),
        pb.GenerateResponse(index=0, chat=pb.ChatDelta(tool_calls=[pb.ToolCallDelta(arguments="}")]), **end),  # type: ignore[arg-type]
        pb.GenerateResponse(index=1, usage=common_pb2.Usage(prompt_tokens=3, completion_tokens=2), **end),  # type: ignore[arg-type]
    )
    async with GrpcServer("127.0.0.1:0", advertise=None) as server:
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        await server.start([])
        async with AsyncClient(server.address) as client:
            yield client, service


async def test_the_client_has_notices_and_chat_pieces_as_events(several: tuple[AsyncClient, Scripted]) -> None:
    client, service = several
    asked = client.stream_chat([{"role": "user", "content": "hé"}], n=2, tool_choice="none", request_id="mine")
    events = [event async for event in asked]
    assert events[0] == Notice("the decode node was lost", "mine")
    assert {event.request_id for event in events} == {"mine"}
    assert events[0].text == ""
    assert isinstance(events[1], Piece)
    assert (events[1].index, events[1].chat and events[1].chat.content) == (1, "b")
    (request,) = service.requests
    assert request.n == 2
    assert request.chat.messages_json == '[{"role": "user", "content": "h\\u00e9"}]'
    assert request.chat.tool_choice_json == '"none"'
    assert not request.HasField("sampling")


async def test_the_client_joins_outputs_by_index(several: tuple[AsyncClient, Scripted]) -> None:
    first, second = await several[0].chat([], n=2)
    assert first.request_id == second.request_id == several[1].requests[0].request_id != ""
    assert (first.index, second.index, second.text) == (0, 1, "b")
    assert (first.text, first.raw_text, first.reasoning) == ("", "a", "a")
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("f", "{}")]
    assert first.usage == second.usage
    assert second.usage.completion_tokens == 2


async def test_the_overload_is_typed_for_the_client(door: Door) -> None:
    async with AsyncClient(door.address, retry_s=0.0) as client:
        events = client.generate("a")
        first = asyncio.create_task(anext(events))
        await door.decode.submission()
        with pytest.raises(Overloaded) as caught:
            await client.complete("b", request_id="refused")
        assert (caught.value.retry_after_s, caught.value.request_id) == (1.0, "refused")
        first.cancel()
        await asyncio.wait([first])
