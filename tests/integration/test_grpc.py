"""The gateway's three gRPC services over real processes: the same tokens through each, and the model described."""

import asyncio
import io
import json
import re
import subprocess
import sysconfig
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as smg
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.client.outputs import Finished, Piece, collect
from baton.core.errors import Cancelled, InvalidRequest, UnknownModel
from baton.core.sampling import SamplingParams
from baton.core.types import FinishReason, Grammar, GrammarKind
from baton.gateway.grpc.services import SERVICE_NAMES
from baton.protos.inference import open_inference_pb2 as oip
from baton.protos.inference import open_inference_pb2_grpc
from baton.protos.v1 import common_pb2, generation_pb2_grpc, node_status_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.channels import connect
from baton.rpc.convert import sampling_to_proto
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import DEADLINE_S, LLAMA, Machines, machines

PROMPT = "The town had"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


class Cluster(NamedTuple):
    """A gateway with a prefill node and a decode node, whose engine a test may hold."""

    start: Machines
    gateway: Process
    decode: Process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template = tmp_path_factory.mktemp("gateway") / "template.jinja"
    template.write_text(TEMPLATE)
    with machines() as start:
        (prefill,) = start.nodes(("prefill", {"model": LLAMA}))
        (decode,) = start.nodes(("decode", {"model": LLAMA}), paused_engine=["decode"])
        start.let_go(decode)
        gateway = start.gateway(
            [prefill], [decode], model=LLAMA, local_policy="strict", chat_template=template, kv_events=True
        )
        yield Cluster(start, gateway, decode)


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Process:
    return cluster.gateway


@pytest.fixture
async def channel(gateway: Process) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(gateway.address) as channel:
        yield channel


@pytest.fixture
async def client(gateway: Process) -> AsyncIterator[OperatorClient]:
    async with OperatorClient(gateway.address) as client:
        yield client


@pytest.fixture
async def expected(client: OperatorClient) -> tuple[list[int], str]:
    """Token ids and text of the greedy output."""
    whole = await client.complete(PROMPT, GREEDY)
    return [token.token_id for token in whole.tokens], whole.text


def greedy(**fields: object) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=PROMPT, **fields)  # type: ignore[arg-type]
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = 8
    return request


# ---- baton.v1.Generation


async def test_complete_gives_what_generate_streams(channel: grpc.aio.Channel, expected: tuple[list[int], str]) -> None:
    call = generation_pb2_grpc.GenerationStub(channel).Complete(greedy(request_id="mine"))
    whole = await call
    (output,) = whole.outputs
    assert ([token.token_id for token in output.tokens], output.text) == expected
    assert output.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert (whole.request_id, whole.usage.completion_tokens) == ("mine", 8)


@pytest.mark.parametrize("whole", [True, False])
async def test_request_id_and_receipt_are_metadata(channel: grpc.aio.Channel, whole: bool) -> None:
    stub = generation_pb2_grpc.GenerationStub(channel)
    call: Any
    if whole:
        call = stub.Complete(greedy(), metadata=(("x-request-id", "a b"), ("traceparent", "nonsense")))
        receipt = (await call).outputs[0].receipt
    else:
        call = stub.Generate(greedy(request_id="a b"), metadata=(("x-request-id", "another"),))
        receipt = [response async for response in call][-1].receipt
    assert dict(await call.initial_metadata())["x-request-id"] == "a b"
    trailing: dict[str, Any] = dict(await call.trailing_metadata())
    assert common_pb2.Receipt.FromString(trailing["baton-receipt-bin"]) == receipt
    assert receipt.path == common_pb2.PATH_REMOTE


async def test_an_id_that_metadata_cannot_carry_is_percent_encoded(channel: grpc.aio.Channel) -> None:
    call = generation_pb2_grpc.GenerationStub(channel).Complete(greedy(request_id="é%"))
    assert (await call).request_id == "é%"
    assert dict(await call.initial_metadata())["x-request-id"] == "%C3%A9%25"


async def test_a_missing_id_is_drawn(channel: grpc.aio.Channel) -> None:
    call = generation_pb2_grpc.GenerationStub(channel).Complete(greedy())
    drawn = (await call).request_id
    assert re.fullmatch("req-[0-9a-f]{32}", drawn)
    assert dict(await call.initial_metadata())["x-request-id"] == drawn


async def test_ids_over_256_bytes_are_refused(channel: grpc.aio.Channel) -> None:
    stub = generation_pb2_grpc.GenerationStub(channel)
    calls: list[grpc.aio.UnaryUnaryCall] = [  # type: ignore[type-arg]
        stub.Complete(greedy(request_id="é" * 129)),
        stub.Complete(greedy(), metadata=(("x-request-id", "x" * 257),)),
        stub.Abort(pb.AbortRequest(request_ids=["x", "y" * 257])),
        vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(vllm.AbortRequest(request_ids=["y" * 257])),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.allowed[0].startswith("up to 256 bytes")
        assert len(error.value) <= 256


async def test_the_client_learns_all_about_the_model(client: OperatorClient) -> None:
    info = await client.model_info()
    assert (info.model.name, info.model.vocab_size, list(info.eos_token_ids)) == ("llama", 4096, [4095])
    archive = await client.tokenizer()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        assert opened.read("tokenizer.json") == (LLAMA / "tokenizer.json").read_bytes()
    with pytest.raises(UnknownModel):
        await client.tokenizer("another")
    loads = await client.loads()
    assert {load.role for load in loads.nodes} == {node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE}
    assert all(load.blocks_total for load in loads.nodes)


async def test_the_gateways_template_goes_with_the_tokenizer(client: OperatorClient) -> None:
    assert (await client.model_info()).has_chat_template
    with zipfile.ZipFile(io.BytesIO(await client.tokenizer())) as opened:
        assert opened.read("chat_template.jinja").decode() == TEMPLATE


async def test_a_chat_is_the_rendered_prompt(client: OperatorClient) -> None:
    chat = await client.chat([{"role": "user", "content": PROMPT}], GREEDY)
    assert chat.text == chat.raw_text == (await client.complete(f"{PROMPT}:", GREEDY)).text
    assert (chat.reasoning, chat.tool_calls, chat.usage.completion_tokens) == ("", (), 8)
    with pytest.raises(InvalidRequest, match="messages"):
        await client.chat([{"role": "user"}])


async def test_a_request_is_aborted_by_its_id(cluster: Cluster, client: OperatorClient) -> None:
    cluster.start.allow_steps(5, cluster.decode)  # so it does not end before it is aborted
    long = SamplingParams(max_tokens=3000, ignore_eos=True)
    events = client.generate(PROMPT, long, request_id="long")
    await anext(events)
    assert await client.abort("long", "unknown") == ["long"]
    with pytest.raises(Cancelled, match="aborted"):
        async for _ in events:
            pass
    cluster.start.let_go(cluster.decode)


async def test_several_outputs_stream_and_complete(client: OperatorClient, channel: grpc.aio.Channel) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=6, seed=3, ignore_eos=True)
    outputs = await client.complete(PROMPT, sampling, n=3)
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [len(output.tokens) for output in outputs] == [6, 6, 6]
    request = pb.GenerateRequest(text=PROMPT, n=3, sampling=sampling_to_proto(sampling))
    call = generation_pb2_grpc.GenerationStub(channel).Complete(request)
    whole = await call
    assert [output.text for output in whole.outputs] == [output.text for output in outputs]
    assert whole.usage.completion_tokens == 18
    trailing: dict[str, Any] = dict(await call.trailing_metadata())
    assert common_pb2.Receipt.FromString(trailing["baton-receipt-bin"]) == whole.outputs[0].receipt


async def test_an_output_follows_its_grammar(client: OperatorClient) -> None:
    assert set((await client.model_info()).grammar_kinds) == {kind.name for kind in GrammarKind}
    chosen = Grammar(GrammarKind.CHOICE, '["north", "south"]')
    whole = await client.complete(PROMPT, {"grammar": chosen, "max_tokens": 20})
    assert whole.text in ("north", "south")


async def test_special_tokens_are_a_choice(client: OperatorClient) -> None:
    info = await client.model_info()
    end = info.eos_token_ids[0]
    assert await client.detokenize([end]) == ""
    assert await client.detokenize([end], skip_special_tokens=False) != ""
    assert await client.tokenize(PROMPT, add_special_tokens=False) == await client.tokenize(PROMPT)


async def test_a_mapping_gives_some_sampling_numbers(client: OperatorClient, expected: tuple[list[int], str]) -> None:
    assert (await client.complete(PROMPT, {"temperature": 0.0, "max_tokens": 8})).text == expected[1]
    with pytest.raises(TypeError, match="no sampling parameter temperatur; there are"):
        await client.complete(PROMPT, {"temperatur": 0.0})
    with pytest.raises(InvalidRequest, match="priority"):
        await client.complete(PROMPT, priority=2**40)


async def test_events_have_the_index_of_their_output(client: OperatorClient) -> None:
    events = [event async for event in client.generate(PROMPT, GREEDY)]
    assert {event.index for event in events if isinstance(event, Piece | Finished)} == {0}


async def test_the_request_id_is_in_every_answer_and_error(client: OperatorClient) -> None:
    events = [event async for event in client.generate(PROMPT, GREEDY, request_id="mine")]
    whole = await client.complete(PROMPT, GREEDY)
    assert {event.request_id for event in events} == {"mine"}
    assert isinstance(events[-1], Finished)
    assert events[-1].receipt.request_id == "mine"
    assert whole.request_id == whole.receipt.request_id != ""
    with pytest.raises(UnknownModel) as refused:
        await client.complete(PROMPT, model="another", request_id="wrong")
    assert refused.value.request_id == "wrong"


async def test_closing_a_stream_early_ends_the_request(client: OperatorClient) -> None:
    events = client.generate(PROMPT, SamplingParams(max_tokens=3000, ignore_eos=True))
    assert isinstance(await anext(events), Piece)
    await events.aclose()
    async with asyncio.timeout(DEADLINE_S):
        while (await client.loads()).requests_running:  # noqa: ASYNC110 (nothing signals it)
            await asyncio.sleep(0.01)


async def test_every_service_is_healthy_and_described(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for name in SERVICE_NAMES:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_buf_curl_calls_by_reflection_alone(gateway: Process) -> None:
    program = Path(sysconfig.get_path("scripts")) / "buf"
    command: list[str | Path] = [
        program,
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        "--data",
        '{"text": "The town had"}',
    ]
    for reflection in ("grpc-v1", "grpc-v1alpha"):
        target = f"http://{gateway.address}/baton.v1.Generation/Tokenize"
        done = subprocess.run(
            [*command, "--reflect-protocol", reflection, target], capture_output=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert len(json.loads(done.stdout)["tokenIds"]) == 4


# ---- vllm.grpc.engine.VllmEngine


def engine_request(client_ids: list[int], *, stream: bool, **params: object) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=8, **params)  # type: ignore[arg-type]
    tokenized = vllm.TokenizedInput(input_ids=client_ids)
    return vllm.GenerateRequest(request_id="engine", tokenized=tokenized, sampling_params=sampling, stream=stream)


async def test_the_engine_streams_the_same_tokens(
    channel: grpc.aio.Channel, client: OperatorClient, expected: tuple[list[int], str]
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    prompt = await client.tokenize(PROMPT)
    responses = [response async for response in stub.Generate(engine_request(prompt, stream=True, logprobs=2))]
    chunks = [response.chunk for response in responses[:-1]]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected[0]
    assert all(len(chunk.output_logprobs.top_logprobs[0].values) == 2 for chunk in chunks)
    last = responses[-1].complete
    assert (last.finish_reason, last.prompt_tokens, list(last.output_ids)) == ("length", len(prompt), [])
    (whole,) = [response async for response in stub.Generate(engine_request(prompt, stream=False))]
    assert list(whole.complete.output_ids) == expected[0]
    assert (whole.complete.prompt_tokens, whole.complete.completion_tokens) == (len(prompt), 8)


async def test_the_engine_names_what_stopped_it(
    channel: grpc.aio.Channel, client: OperatorClient, expected: tuple[list[int], str]
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    prompt = await client.tokenize(PROMPT)
    request = engine_request(prompt, stream=False, stop_token_ids=[expected[0][2]])
    (by_token,) = [response.complete async for response in stub.Generate(request)]
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", expected[0][2])
    request = engine_request(prompt, stream=True, stop=[expected[1].split()[2]])
    *_, by_string = [response async for response in stub.Generate(request)]
    assert by_string.complete.matched_stop_str == expected[1].split()[2]


async def test_the_engine_describes_itself(channel: grpc.aio.Channel) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.model_type, list(info.eos_token_ids)) == ("llama", "llama", [4095])
    assert (await stub.GetServerInfo(vllm.GetServerInfoRequest())).server_type == "vllm-grpc"
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
    assert load.max_total_num_tokens > 0
    pieces = [piece async for piece in stub.GetTokenizer(smg.GetTokenizerRequest())]
    assert [bool(piece.sha256) for piece in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_a_router_learns_which_prompts_the_nodes_have_cached(
    channel: grpc.aio.Channel, client: OperatorClient
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    block_size = (await stub.GetServerInfo(vllm.GetServerInfoRequest())).block_size
    prompt = [11, 7, 5, 3] * block_size  # four blocks
    events = stub.SubscribeKvEvents(smg.SubscribeKvEventsRequest(start_sequence_number=41))
    cleared = await events.read()
    assert (cleared.sequence_number, cleared.events[0].WhichOneof("data")) == (42, "cleared")
    assert (cleared.snapshot.index, cleared.snapshot.count) == (0, 1)
    await client.complete(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    known: dict[int, list[int]] = {}  # all tokens up to the end of each block
    sequence = cleared.sequence_number
    while prompt not in known.values():
        batch = await events.read()
        sequence += 1
        assert batch.sequence_number == sequence
        for event in batch.events:
            stored = event.stored
            so_far = known[stored.parent_block_hash] if stored.HasField("parent_block_hash") else []
            for block in stored.blocks:
                assert block.block_size == len(block.token_ids) == block_size
                so_far = known[block.block_hash] = [*so_far, *block.token_ids]
    events.cancel()


async def test_what_the_engine_cannot_do_has_a_reason(channel: grpc.aio.Channel) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    calls: list[grpc.aio.Call] = [
        stub.Embed(vllm.EmbedRequest()),
        stub.FlushCache(smg.FlushCacheRequest()),
        stub.StartProfile(smg.StartProfileRequest()),
        stub.StopProfile(smg.StopProfileRequest()),
    ]
    for call in calls:
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        assert len(await call.details()) > 20


# ---- inference.GRPCInferenceService


def infer(text: str, name: str = "llama", *, stream: bool = False) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(model_name=name, id=text)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(text.encode())
    request.parameters["temperature"].double_param = 0.0
    request.parameters["max_tokens"].int64_param = 8
    request.parameters["stream"].bool_param = stream
    return request


def outputs(response: oip.ModelInferResponse) -> dict[str, object]:
    return {
        output.name: [*output.contents.bytes_contents, *output.contents.uint_contents][0] for output in response.outputs
    }


async def test_open_inference_infers_text(channel: grpc.aio.Channel, expected: tuple[list[int], str]) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    response = await stub.ModelInfer(infer(PROMPT))
    assert outputs(response) == {
        "text_output": expected[1].encode(),
        "finish_reason": b"length",
        "num_input_tokens": 4,
        "num_output_tokens": 8,
    }
    assert (response.id, response.model_name) == (PROMPT, "llama")
    unnamed = infer(PROMPT)
    unnamed.ClearField("id")
    assert (await stub.ModelInfer(unnamed)).id.startswith("req-")


async def test_open_inference_streams_and_goes_on_after_an_error(
    channel: grpc.aio.Channel, expected: tuple[list[int], str]
) -> None:
    async def requests() -> AsyncIterator[oip.ModelInferRequest]:
        yield infer(PROMPT, stream=True)
        yield infer(PROMPT, "another")
        yield infer(PROMPT)

    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    answers = [answer async for answer in stub.ModelStreamInfer(requests())]
    failed = next(index for index, answer in enumerate(answers) if answer.error_message)
    assert "'another' is not served" in answers[failed].error_message
    streamed = [str(outputs(answer.infer_response)["text_output"], "utf-8") for answer in answers[:failed]]  # type: ignore[call-overload]
    assert "".join(streamed) == expected[1]
    finals = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert finals == [False] * (failed - 1) + [True] * 3
    assert outputs(answers[-1].infer_response)["text_output"] == expected[1].encode()


async def test_open_inference_is_ready_for_the_served_model_only(channel: grpc.aio.Channel) -> None:
    stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert (await stub.ServerLive(oip.ServerLiveRequest())).live
    assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
    assert (await stub.ModelReady(oip.ModelReadyRequest(name="llama"))).ready
    metadata = await stub.ModelMetadata(oip.ModelMetadataRequest(name="llama"))
    assert "text_input" in [tensor.name for tensor in metadata.inputs]
    assert (await stub.ServerMetadata(oip.ServerMetadataRequest())).name == "baton"
    refused = stub.ModelReady(oip.ModelReadyRequest(name="another"))
    assert await refused.code() is grpc.StatusCode.NOT_FOUND
    assert "llama" not in await refused.details()  # anyone may ask
    load = stub.RepositoryModelLoad(oip.RepositoryModelLoadRequest(model_name="another"))
    assert await load.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_refusal_names_the_request_for_clients_of_any_kind(client: OperatorClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await collect(client.generate(PROMPT, {"top_p": 2.0}))
    assert caught.value.field == "top_p"
    assert (await client.complete(PROMPT, GREEDY)).finish_reason is FinishReason.LENGTH
