"""Errors about requests name the wrong field and the allowed values."""

import math
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ContextOverflow, InvalidRequest, UnknownModel
from baton.core.sampling import ResolvedSampling, SamplingParams
from baton.core.types import Grammar, GrammarKind
from baton.gateway.core.request import OutputEnd, Outputs
from baton.gateway.serving.validate import (
    check_output,
    check_outputs,
    check_prompt,
    check_prompt_given,
    check_request_id,
    check_sampling,
    check_session_id,
    check_text,
    end_of,
)
from baton.gateway.text.chat.checkpoint_files import read_checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.renderer import ChatRenderer
from baton.gateway.text.model import ServedModel
from baton.gateway.text.tokenizer import TextTokenizer
from baton.grammar.checker import GrammarChecker
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.tokenizers import byte_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    directory: Path = tmp_path_factory.mktemp("model")
    byte_level().save(str(directory / "tokenizer.json"))
    checkpoint = read_checkpoint(directory, None)
    return ServedModel(
        name="small",
        architecture="LlamaForCausalLM",
        config_digest="0",
        vocabulary_digest="",
        vocab_size=320,
        max_context_tokens=64,
        tokenizer=TextTokenizer(directory),
        directory=directory,
        eos_token_ids=(1,),
        bos_token_id=0,
        default_sampling=SamplingParams(),
        chat=ChatModel(checkpoint),
        renderer=ChatRenderer(checkpoint),
        grammars=GrammarChecker(directory / "tokenizer.json", 320, [1]),
    )


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
        ({"stop_token_ids": [3] * 1025}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"stop": ["x" * 256] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
    ],
)
def test_a_wrong_sampling_parameter_is_named(model: ServedModel, sampling: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_sampling(common_pb2.SamplingParams(**sampling), model)  # type: ignore[arg-type]
    assert raised.value.field == field
    assert raised.value.allowed


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1] * 64, "maximum context length is 64 tokens. However, your prompt has 64 tokens"),
        ([3, 320], "prompt has token id 320"),
    ],
)
def test_a_wrong_prompt_is_named(model: ServedModel, prompt: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        check_prompt(prompt, model, max_context_tokens=64)
    assert raised.value.field == "prompt"
    assert raised.value.allowed


def test_a_prompt_that_only_the_nodes_caches_are_too_small_for_names_their_settings(model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_prompt([1] * 40, model, max_context_tokens=40)
    assert "room for the model's 64 tokens with --kv-cache-mib" in raised.value.cure
    with pytest.raises(InvalidRequest) as raised:
        check_prompt([1] * 64, model, max_context_tokens=64)
    assert raised.value.cure == "shorten it"


def test_the_longest_prompt_leaves_room_for_one_token(model: ServedModel) -> None:
    check_prompt([1] * 63, model, max_context_tokens=64)


def test_a_request_without_prompt_is_refused_with_the_ways_to_give_one() -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_prompt_given(pb.GenerateRequest())
    assert raised.value.allowed == ("text", "token_ids", "chat")
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
    drawn = {check_sampling(common_pb2.SamplingParams(temperature=0.5), model).seed for _ in range(4)}
    assert None not in drawn
    assert len(drawn) == 4
    assert check_sampling(common_pb2.SamplingParams(temperature=0.5, seed=0), model).seed == 0


@pytest.mark.parametrize("request_id", ["a", "ä日 x", "👨‍👩", "x" * 256, "ä" * 128])
def test_any_printable_id_is_kept(request_id: str) -> None:
    assert check_request_id(request_id) == request_id


def test_an_id_is_drawn_when_the_client_gave_none() -> None:
    assert check_request_id("") != check_request_id("")


@pytest.mark.parametrize("request_id", ["x" * 257, "ä" * 129, "a\nb", "a\x00", "\x1b[2J", "a\x85", "a b"])
def test_an_id_that_is_long_or_would_forge_log_lines_is_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_request_id(request_id)
    assert raised.value.field == "request_id"
    assert raised.value.allowed
    assert str(raised.value).isprintable()
    assert raised.value.value.isprintable()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Outputs(1, 1)),
        ({"n": 3}, Outputs(3, 3)),
        ({"n": 2, "best_of": 5}, Outputs(5, 2)),
        ({"best_of": 2}, Outputs(2, 1)),
    ],
)
def test_the_number_of_outputs_is_read(given: dict[str, Any], expected: Outputs) -> None:
    assert check_outputs(pb.GenerateRequest(**given), max_outputs=100) == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [({"n": 101}, "n"), ({"n": 3, "best_of": 2}, "best_of"), ({"best_of": 101}, "best_of"), ({"n": 2**31}, "n")],
)
def test_a_wrong_number_of_outputs_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_outputs(pb.GenerateRequest(**given), max_outputs=100)
    assert raised.value.field == field


def test_a_text_longer_than_any_context_is_not_tokenized(model: ServedModel) -> None:
    limit = 10 * model.tokenizer.longest_token_bytes
    check_text("x" * limit, model, max_context_tokens=10, field="prompt")
    for text in ("x" * (limit + 1), "ä" * (limit // 2 + 1)):
        with pytest.raises(ContextOverflow, match="at least 11 tokens") as raised:
            check_text(text, model, max_context_tokens=10, field="prompt")
        assert raised.value.field == "prompt"


def test_a_long_session_id_is_refused() -> None:
    assert check_session_id("x" * 256) == "x" * 256
    with pytest.raises(InvalidRequest) as raised:
        check_session_id("x" * 257)
    assert raised.value.field == "session_id"


def continuation(count: int = 3, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(output_token_ids=range(3, 3 + count), **fields)


def output_of(request: pb.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    sampling = check_sampling(request.sampling, model)
    return check_output(request, sampling, model, prompt_tokens=50, max_tokens=64)


def test_an_answer_goes_on_after_the_tokens_that_the_client_has(model: ServedModel) -> None:
    greedy = common_pb2.SamplingParams(temperature=0.0, max_tokens=100)
    drawn = common_pb2.SamplingParams(temperature=1.0, max_tokens=100, seed=0)
    assert output_of(continuation(sampling=greedy), model) == (3, 4, 5)
    assert output_of(continuation(14, sampling=drawn), model) == tuple(range(3, 17))
    assert output_of(pb.GenerateRequest(), model) == ()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (continuation(n=2, sampling=common_pb2.SamplingParams(temperature=0.0)), "continues one output"),
        (continuation(best_of=2, sampling=common_pb2.SamplingParams(temperature=0.0)), "continues one output"),
        (continuation(sampling=common_pb2.SamplingParams(temperature=1.0)), "the seed is missing"),
        (
            continuation(sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=2)),
            "has 3 tokens; allowed: up to 2",
        ),
        (
            continuation(15, sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=100)),
            "has 15 tokens; allowed: up to 14",
        ),
        (
            pb.GenerateRequest(output_token_ids=[320], sampling=common_pb2.SamplingParams(temperature=0.0)),
            "has token id 320",
        ),
    ],
)
def test_an_answer_that_cannot_go_on_is_refused(model: ServedModel, request_: pb.GenerateRequest, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as raised:
        output_of(request_, model)
    assert raised.value.field == "output_token_ids"


STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("last", "sampling", "end"),
    [
        (7, ResolvedSampling(), None),
        (7, ResolvedSampling(max_tokens=3), OutputEnd(LENGTH, "")),
        (7, ResolvedSampling(stop_token_ids=(7,)), OutputEnd(STOP, "7")),
        (7, ResolvedSampling(stop_token_ids=(7,), min_tokens=3), None),
        ("eos", ResolvedSampling(), OutputEnd(STOP, "")),
        ("eos", ResolvedSampling(max_tokens=3), OutputEnd(STOP, "")),
        ("eos", ResolvedSampling(min_tokens=3), None),
        ("eos", ResolvedSampling(ignore_eos=True), None),
        ("eos", ResolvedSampling(ignore_eos=True, grammar=Grammar(GrammarKind.JSON_OBJECT)), OutputEnd(STOP, "")),
    ],
)
def test_tokens_that_the_client_has_may_be_the_whole_output(
    model: ServedModel, last: int | str, sampling: ResolvedSampling, end: OutputEnd | None
) -> None:
    token_id = model.eos_token_ids[0] if isinstance(last, str) else last
    assert end_of([5, 6, token_id], sampling, model, max_output=min(sampling.max_tokens, 14)) == end


def test_without_tokens_no_output_has_ended(model: ServedModel) -> None:
    assert end_of([], ResolvedSampling(), model, max_output=14) is None
