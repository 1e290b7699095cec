"""Errors about requests name the wrong field and the allowed values."""

import math
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, UnknownModel
from gateway.model import ServedModel
from gateway.tokenizer import TextTokenizer
from gateway.validate import check_prompt, check_prompt_given, check_sampling
from protos.baton.v1 import common_pb2
from protos.baton.v1 import generation_pb2 as pb
from tests.unit.gateway.tokenizers import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory: Path = tmp_path_factory.mktemp("model")
    byte_level().save(str(directory / "tokenizer.json"))
    return ServedModel(
        name="small",
        architecture="LlamaForCausalLM",
        config_digest="0",
        vocab_size=320,
        max_context_tokens=64,
        tokenizer=TextTokenizer(directory),
        directory=directory,
    )


def request(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", sampling=common_pb2.SamplingParams(**sampling))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": math.inf}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]"),
        ({"logit_bias": {320: 1.0}}, "sampling.logit_bias"),
        ({"stop_token_ids": [3, 320]}, "sampling.stop_token_ids"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(model: ServedModel, sampling: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_sampling(request(**sampling), model)
    assert raised.value.field == field
    assert raised.value.allowed


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "the prompt has no tokens"), ([1] * 64, "the prompt has 64 tokens"), ([3, 320], "prompt has token id 320")],
)
def test_a_wrong_prompt_is_named(model: ServedModel, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        check_prompt(prompt, model, max_context_tokens=64)
    assert raised.value.field == "prompt"
    assert raised.value.allowed


def test_the_longest_prompt_leaves_room_for_one_token(model: ServedModel) -> None:
    check_prompt([1] * 63, model, max_context_tokens=64)


def test_a_request_without_prompt_is_refused_with_both_ways_to_give_one() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_prompt_given(pb.GenerateRequest())
    assert raised.value.allowed == ("text", "token_ids")
    check_prompt_given(pb.GenerateRequest(text="a"))
    check_prompt_given(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[0])))


@pytest.mark.parametrize("empty", [pb.GenerateRequest(text=""), pb.GenerateRequest(token_ids=pb.TokenIds())])
def test_an_empty_prompt_is_refused(empty: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        check_prompt_given(empty)


def test_an_unknown_model_is_answered_with_the_known_one(model: ServedModel) -> None:
    model.check_name("")
    model.check_name("small")
    with pytest.raises(UnknownModel) as raised:
        model.check_name("large")
    assert raised.value.allowed == ("small",)


def test_a_seed_is_drawn_for_sampling_when_the_client_gave_none(model: ServedModel) -> None:
    drawn = {check_sampling(request(temperature=0.5), model).seed for _ in range(4)}
    assert None not in drawn
    assert len(drawn) == 4
    assert check_sampling(request(temperature=0.5, seed=0), model).seed == 0
    assert check_sampling(request(temperature=0.0), model).seed is None
