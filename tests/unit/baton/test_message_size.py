"""Messages with more fields than a request needs are recognized by their bytes."""

import pytest
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from baton.protos.inference import open_inference_pb2 as oip
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.malformed import is_too_much

IDS = list(range(50_000))
TEXT = "x" * 100_000


def too_much(message: Message, *, more: bytes = b"", fields: int = 1000, numbers: int = 100_000) -> bool:
    data = message.SerializeToString() + more
    return is_too_much(data, message.DESCRIPTOR, fields_max=fields, numbers_max=numbers)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS)),
        pb.GenerateRequest(text=TEXT, sampling=common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(300), 1.0))),
        pb.GenerateRequest(chat=pb.Chat(messages_json=TEXT)),
        vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=IDS)),
        oip.ModelInferRequest(raw_input_contents=[TEXT.encode()]),
        pb.DetokenizeRequest(token_ids=IDS),
    ],
)
def test_a_large_request_is_not_too_much(message: Message) -> None:
    assert not too_much(message)
    assert too_much(message, fields=0)


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(text=TEXT, sampling=common_pb2.SamplingParams(stop=[""] * 2000)),
        pb.GenerateRequest(text=TEXT, sampling=common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0))),
        vllm.GenerateRequest(text=TEXT, sampling_params=vllm.SamplingParams(stop=[""] * 2000)),
        oip.ModelInferRequest(id=TEXT, inputs=[oip.ModelInferRequest.InferInputTensor()] * 2000),
        oip.ModelInferRequest(id=TEXT, raw_input_contents=[b""] * 2000),
        pb.DetokenizeRequest(token_ids=[1] * 600_000),
        vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[1] * 600_000)),
    ],
)
def test_many_fields_or_numbers_are_too_much_at_any_depth(message: Message) -> None:
    assert too_much(message)


@pytest.mark.parametrize("more", [b"\x0a", b"\x0a\xff\xff\x03", b"\x80" * 50, b"\x0b", b"\x09"])
def test_a_message_whose_fields_do_not_fit_is_not_parsed(more: bytes) -> None:
    assert too_much(pb.GenerateRequest(text=TEXT), more=more)
