"""The sampling parameters: one declaration each, and nothing is sent that the client did not set."""

import math
from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from baton.client.messages import generate_message
from baton.core.errors import InvalidRequest
from baton.core.sampling import SAMPLING_FIELDS, SamplingParams
from baton.core.sampling_field import HTTP, Door
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.bodies import ChatBody, CompletionBody
from baton.gateway.http.checking import Model
from baton.gateway.http.responses.models import ResponsesRequest

BODIES: dict[Door, type[Model]] = {
    Door.CHAT: ChatBody,
    Door.COMPLETIONS: CompletionBody,
    Door.RESPONSES: ResponsesRequest,
    Door.MESSAGES: MessagesRequest,
}


def test_params_and_a_mapping_send_the_same() -> None:
    given: dict[str, Any] = {"seed": 1, "stop": ["x"], "logit_bias": {3: 1.5}}
    message = generate_message([1], SamplingParams(**given), {})
    assert message == generate_message([1], given, {})
    assert {field.name for field, _ in message.sampling.ListFields()} == {*given}


@pytest.mark.parametrize("make", [SamplingParams, lambda **given: generate_message([1], given, {})])
def test_a_misspelt_parameter_is_a_type_error_with_the_allowed_ones(make: Any) -> None:
    with pytest.raises(TypeError, match=r"no sampling parameter tempreture; there are max_tokens, .*temperature"):
        make(tempreture=1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": math.nan},
        {"temperature": "hot"},
        {"top_k": True},
        {"max_tokens": 2**32},
        {"max_tokens": 4, "min_tokens": 5},
        {"stop": "word"},
        {"stop": [""]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {7: 101}},
        {"grammar": "json"},
    ],
)
def test_a_wrong_value_is_named_with_the_allowed_ones(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(**wrong)
    assert raised.value.field.partition("[")[0] in wrong
    assert raised.value.allowed


def test_set_parameters_come_before_the_models_and_those_before_the_neutral_ones() -> None:
    given = SamplingParams(seed=1, top_k=0)
    resolved = given.over(SamplingParams(temperature=0.25, top_k=7)).resolved()
    assert (resolved.seed, resolved.top_k, resolved.temperature, resolved.top_p) == (1, 0, 0.25, 1.0)


@pytest.mark.parametrize("field", SAMPLING_FIELDS.values(), ids=lambda field: field.name)
def test_defaults_are_allowed_and_every_door_has_the_name_that_the_table_gives(field: Any) -> None:
    if field.default is not None:
        field.check(field.default)
    for door in HTTP:
        if door in field.doors and "." not in field.name_at(door):
            assert field.name_at(door) in BODIES[door].model_fields
    if Door.VLLM in field.doors:
        names = vllm.SamplingParams.DESCRIPTOR
        assert field.name_at(Door.VLLM) in {*names.fields_by_name, *names.oneofs_by_name}
