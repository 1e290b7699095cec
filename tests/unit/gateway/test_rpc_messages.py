"""Messages of vLLM's engine service and of the Open Inference Protocol as Baton's, and back; collected outputs."""

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.grpc.open_inference_messages import read_request, to_response
from baton.gateway.grpc.vllm_messages import to_chunk, to_complete, to_generate
from baton.gateway.serving.collected import AnswerCollector
from baton.protos.inference import open_inference_pb2 as oip
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.convert import sampling_from_proto

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
CONTEXT = 100


def generate(**params: Any) -> pb.GenerateRequest:
    return to_generate(vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**params)), [1, 2, 3], CONTEXT)


# ---- vLLM


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"stop": ["a"] * 10_000}, "stop"),
        ({"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(-5, 10_000), 1.0)}, "logit_bias"),
    ],
)
def test_a_long_list_is_refused_by_its_length_before_its_values_are_read(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate(**params)
    assert (caught.value.field, caught.value.value.isdecimal()) == (field, True)


def test_absent_numbers_are_vllms_defaults_not_the_models() -> None:
    sampling = generate().sampling
    for name, value in {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}.items():
        assert sampling.HasField(name)  # type: ignore[arg-type]
        assert getattr(sampling, name) == value
    assert sampling.max_tokens == CONTEXT - 3
    assert not sampling.HasField("seed")
    assert not sampling.HasField("logprobs")


def test_numbers_of_32_bits_are_those_that_the_client_wrote() -> None:
    sampling = generate(temperature=0.7, top_p=0.95, min_p=0.05, logit_bias={5: -1.1}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.7, 0.95, 0.05)
    assert dict(sampling.logit_bias) == {5: -1.1}


@pytest.mark.parametrize(
    ("constraint", "grammar"),
    [
        ({"json_schema": "{}"}, Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        ({"regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, Grammar(GrammarKind.GBNF, 'root ::= "a"')),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"structural_tag": "{}"}, Grammar(GrammarKind.STRUCTURAL_TAG, "{}")),
        ({"json_object": True}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        ({"choice": vllm.ChoiceConstraint(choices=["é", "b"])}, Grammar(GrammarKind.CHOICE, '["é", "b"]')),
    ],
)
def test_constraints_become_grammars(constraint: dict[str, Any], grammar: Grammar | None) -> None:
    assert sampling_from_proto(generate(**constraint).sampling).grammar == grammar


@pytest.mark.parametrize(
    ("truncate", "kept", "room"), [(-1, CONTEXT - 1, CONTEXT - 3), (2, 2, CONTEXT - 2), (50, 50, CONTEXT - 3)]
)
def test_truncation_leaves_room_for_the_output(truncate: int, kept: int, room: int) -> None:
    message = generate(truncate_prompt_tokens=truncate)
    assert (message.truncate_prompt_tokens, message.sampling.max_tokens) == (kept, room)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": -5}, "seed"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias[-1]"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate(**params)
    assert caught.value.field == field


def test_a_seed_of_minus_one_is_none() -> None:
    assert not generate(seed=-1).sampling.HasField("seed")
    assert generate(seed=7).sampling.seed == 7


@pytest.mark.parametrize(
    "request_fields",
    [
        {"kv_transfer_params_json": "{}"},
        {"mm_inputs": vllm.MultimodalInputs()},
        {"extra_mm_inputs": [vllm.MultimodalInputs()]},
        {"media_refs": vllm.MediaRefs()},
        {"data_parallel_rank": 1},
    ],
)
def test_what_baton_does_not_do_is_refused_by_name(request_fields: dict[str, Any]) -> None:
    (field,) = request_fields
    with pytest.raises(InvalidRequest) as caught:
        to_generate(vllm.GenerateRequest(**request_fields), [1], CONTEXT)
    assert caught.value.field == field


def tokens(*ids: int, logprob: float = -0.5) -> list[common_pb2.Token]:
    top = [common_pb2.TokenLogprob(token_id=9, logprob=-0.25)]
    return [common_pb2.Token(token_id=each, logprob=logprob, top_logprobs=top) for each in ids]


def test_a_chunk_has_the_counts_and_logprobs_of_its_own_tokens() -> None:
    prompt = [common_pb2.PromptLogprob(token_id=1), common_pb2.PromptLogprob(token_id=2, logprob=-1.0)]
    message = pb.GenerateResponse(tokens=tokens(4, 5), prompt_logprobs=prompt, index=1)
    wanted = vllm.SamplingParams(logprobs=1, prompt_logprobs=0)
    chunk = to_chunk(message, prompt_tokens=2, cached_tokens=0, sampling=wanted).chunk
    assert (list(chunk.token_ids), chunk.completion_tokens, chunk.prompt_tokens, chunk.index) == ([4, 5], 2, 2, 1)
    assert list(chunk.output_logprobs.token_logprobs) == [-0.5, -0.5]
    assert [list(top.token_ids) for top in chunk.output_logprobs.top_logprobs] == [[9], [9]]
    assert [each.HasField("value") for each in chunk.input_logprobs.token_logprobs] == [False, True]
    assert not chunk.input_logprobs.top_logprobs
    bare = to_chunk(message, prompt_tokens=2, cached_tokens=0, sampling=vllm.SamplingParams()).chunk
    assert not bare.HasField("output_logprobs")


@pytest.mark.parametrize(
    ("stop_reason", "last", "matched"),
    [
        ("7", 7, ("matched_token_id", 7)),
        ("7", 6, ("matched_stop_str", "7")),
        ("", 2, None),
        ("\n", 7, ("matched_stop_str", "\n")),
    ],
)
def test_a_stop_token_is_told_from_a_stop_string(stop_reason: str, last: int, matched: tuple[str, Any] | None) -> None:
    output = pb.Output(tokens=tokens(last), finish_reason=STOP, stop_reason=stop_reason)
    wanted = vllm.SamplingParams(stop_token_ids=[7], stop=["7", "\n"])
    complete = to_complete(output, (), prompt_tokens=1, cached_tokens=0, sampling=wanted, last_token_id=last).complete
    kind = complete.WhichOneof("matched_stop")
    assert (kind and (kind, getattr(complete, kind))) == matched
    assert complete.finish_reason == "stop"


# ---- Open Inference


def infer(text: bytes = b"hello", *, raw: bool = False, **parameters: Any) -> oip.ModelInferRequest:
    request = oip.ModelInferRequest(id="1")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    if raw:
        request.raw_input_contents.append(struct.pack("<I", len(text)) + text)
    else:
        tensor.contents.bytes_contents.append(text)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def with_sampling(data: str, *, raw: bool = False) -> oip.ModelInferRequest:
    request = infer(raw=raw)
    tensor = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    if raw:
        request.raw_input_contents.append(struct.pack("<I", len(data)) + data.encode())
    else:
        tensor.contents.bytes_contents.append(data.encode())
    return request


@pytest.mark.parametrize("raw", [False, True])
def test_parameters_come_as_parameters_or_as_json(raw: bool) -> None:
    given = infer(raw=raw, max_tokens=5, temperature="0.7", ignore_eos=True, stop="x", priority=-1, cache_salt="s")
    message = read_request(given).message
    assert message.text == "hello"
    assert (message.sampling.max_tokens, message.sampling.temperature) == (5, 0.7)
    assert (list(message.sampling.stop), message.sampling.ignore_eos) == (["x"], True)
    assert (message.priority, message.cache_salt) == (-1, "s")
    sampling = {"max_tokens": 5, "temperature": "0.7", "stop": ["x"], "ignore_eos": "true", "stop_token_ids": [1, 2]}
    message = read_request(with_sampling(json.dumps(sampling), raw=raw)).message
    assert (message.sampling.max_tokens, message.sampling.temperature) == (5, 0.7)
    assert list(message.sampling.stop_token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (infer(unheard=1), "parameters"),
        (infer(grammar="x"), "parameters"),
        (infer(max_tokens=-1), "max_tokens"),
        (infer(max_tokens="many"), "max_tokens"),
        (infer(max_tokens=0.5), "max_tokens"),
        (infer(max_tokens=True), "max_tokens"),
        (infer(seed="inf"), "seed"),
        (infer(ignore_eos="perhaps"), "ignore_eos"),
        (infer(stream=3), "stream"),
        (infer(b"\xff"), "inputs.text_input"),
        (with_sampling("{"), "inputs.sampling_parameters"),
        (with_sampling("[" * 100_000), "inputs.sampling_parameters"),
        (with_sampling("[]"), "inputs.sampling_parameters"),
        (with_sampling('{"stop": 1}'), "stop"),
        (with_sampling('{"stop": ["a", 1]}'), "stop[1]"),
        (with_sampling('{"stop_token_ids": [1, -1]}'), "stop_token_ids[1]"),
        (with_sampling('{"stop_token_ids": [1, 2.5]}'), "stop_token_ids[1]"),
        (with_sampling('{"stop": ["a"%s]}' % (', "a"' * 1024)), "stop"),
        (with_sampling('{"a": [%s 1]}' % ("[[]]," * 100_000)), "inputs.sampling_parameters"),
        (with_sampling('{"seed": 1, "seed": 2}'), "inputs.sampling_parameters"),
        (oip.ModelInferRequest(outputs=[oip.ModelInferRequest.InferRequestedOutputTensor()] * 1000), "outputs"),
        (with_sampling('{"temperature": {}}'), "temperature"),
        (with_sampling('{"max_tokens": 1e400}'), "inputs.sampling_parameters"),
        (oip.ModelInferRequest(), "inputs"),
        (oip.ModelInferRequest(model_version="2"), "version"),
    ],
)
def test_a_wrong_value_is_named(request_: oip.ModelInferRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(request_)
    assert caught.value.field == field


def wrong_tensors() -> list[oip.ModelInferRequest]:
    requests = [infer() for _ in range(6)] + [infer(raw=True) for _ in range(2)]
    requests[0].inputs[0].datatype = "FP32"
    requests[1].inputs[0].shape[:] = [2]
    requests[2].inputs[0].contents.Clear()
    requests[3].inputs[0].name = "image"
    requests[4].inputs.append(requests[4].inputs[0])
    requests[5].outputs.add(name="embedding")
    requests[6].raw_input_contents[0] = b"\x05\0\0\0hell"
    requests[7].raw_input_contents.append(b"")
    return requests


@pytest.mark.parametrize("request_", wrong_tensors())
def test_a_wrong_tensor_is_refused(request_: oip.ModelInferRequest) -> None:
    with pytest.raises(InvalidRequest):
        read_request(request_)


@given(data=st.binary(max_size=80), raw=st.binary(max_size=20))
def test_random_requests_are_read_or_refused(data: bytes, raw: bytes) -> None:
    request = infer(raw=True)
    request.raw_input_contents[0] = raw
    with suppress(DecodeError):  # what parsing merged before stays
        request.MergeFromString(data)
    with suppress(InvalidRequest):
        read_request(request)


@pytest.mark.parametrize("raw", [False, True])
def test_a_response_has_the_wanted_outputs_in_the_requests_form(raw: bool) -> None:
    request = infer(raw=raw)
    request.outputs.add(name="num_output_tokens")
    request.outputs.add(name="text_output")
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=2)
    response = to_response(request, pb.Output(text="é", finish_reason=LENGTH), usage, name="m", raw=raw)
    assert [(output.name, output.datatype) for output in response.outputs] == [
        ("num_output_tokens", "UINT32"),
        ("text_output", "BYTES"),
    ]
    if raw:
        assert list(response.raw_output_contents) == [b"\x02\0\0\0", b"\x02\0\0\0" + "é".encode()]
    else:
        assert list(response.outputs[0].contents.uint_contents) == [2]
        assert list(response.outputs[1].contents.bytes_contents) == ["é".encode()]


# ---- collected outputs


async def test_outputs_are_collected_by_index() -> None:
    collector = AnswerCollector()
    call = pb.ToolCallDelta(index=0, id="c", name="f", arguments="{")
    rest = pb.ToolCallDelta(index=0, arguments="}")
    end = pb.GenerateResponse(index=0, text="c", finish_reason=STOP, chat=pb.ChatDelta(tool_calls=[rest]))
    end.receipt.decode_node = "d"
    for message in (
        pb.GenerateResponse(notice="waiting"),
        pb.GenerateResponse(index=1, text="b", tokens=tokens(2)),
        pb.GenerateResponse(index=0, text="a", tokens=tokens(1), chat=pb.ChatDelta(content="a", tool_calls=[call])),
        end,
        pb.GenerateResponse(index=1, finish_reason=LENGTH, usage=common_pb2.Usage(completion_tokens=2)),
    ):
        await collector.write(message)
    whole = collector.response("r")
    assert [(output.index, output.text) for output in whole.outputs] == [(0, "ac"), (1, "b")]
    assert whole.outputs[0].receipt.decode_node == "d"
    assert (whole.outputs[0].chat.content, whole.outputs[0].chat.tool_calls[0].arguments) == ("a", "{}")
    assert not whole.outputs[1].HasField("chat")
    assert (whole.usage.completion_tokens, whole.request_id) == (2, "r")
