"""Bodies of Responses and Messages with a part replaced by something else: each is served or refused by its field, and
nothing else happens."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.core.errors import InvalidRequest
from baton.gateway.http.anthropic import translate as anthropic
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.body_reader import parse_object
from baton.gateway.http.checking import checked
from baton.gateway.http.errors import HttpRefusal, openai_error
from baton.gateway.http.responses import translate as responses
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from tests.integration.chatting import TEMPLATE
from tests.integration.cluster import LLAMA

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES = {
    "model": "llama",
    "instructions": "Be kind.",
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "there"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A call."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}]},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [{"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "max_output_tokens": 5,
    "temperature": 0.5,
    "logit_bias": {"3": 1},
    "stop": ["a"],
    "include": ["message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "chat_template_kwargs": {"enable_thinking": True},
    "seed": 3,
}
MESSAGES = {
    "model": "llama",
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A call.", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "max_tokens": 2000,
    "stop_sequences": ["a"],
    "top_k": 3,
    "metadata": {"user_id": "u"},
}

Way = tuple[str | int, ...]


def ways(value: object, way: Way = ()) -> Iterator[Way]:
    """The ways to all values within this one."""
    yield way
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ways(inner, (*way, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from ways(inner, (*way, index))


def deep(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


ODD = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1.5, 2**31, 2**32, 2**53, 2**64, 1e308, [], {}, [[]], [None], [{}]]),
    st.sampled_from(["", " ", "auto", "\x00", "x" * 5000, "{", "{}", "text", "none", "any", "user", "system", "tool"]),
    st.sampled_from(
        ["assistant", "weather", "c1", "</think>", "{{ 7 * 7 }}", {"type": "text"}, {"type": []}, {"": ""}]
    ),
    st.sampled_from([{"type": "text"}, {"type": []}, {"": ""}, deep(100), deep(120), ["a"] * 2000]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
)


def mutated(body: dict[str, Any], way: Way, odd: object, how: str) -> dict[str, Any]:
    """The body with the value at the end of the way replaced, removed, doubled, or with a value added to it."""
    made: Any = {"body": copy.deepcopy(body)}
    outer = made
    last: str | int = "body"
    for part in way:
        outer, last = outer[last], part
    inner = outer[last]
    if how == "replace":
        outer[last] = odd
    elif how == "remove":
        del outer[last]
    elif how == "double" and isinstance(inner, list):
        inner += inner
    elif isinstance(inner, dict):
        inner["odd"] = odd
    elif isinstance(inner, list):
        inner.append(odd)
    found: dict[str, Any] = made.get("body", {})
    return found


def change(body: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    hows = st.sampled_from(["replace", "remove", "double", "add"])
    return st.builds(mutated, st.just(body), st.sampled_from([way for way in ways(body) if way]), ODD, hows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    return read_chat_model(LLAMA, template)


def responses_prompt(model: ChatModel, body: dict[str, Any]) -> None:
    request = checked(ResponsesRequest, parse_object(json.dumps(body).encode()))
    responses.to_message(request).SerializeToString()
    model.prepare(responses.to_chat(request))


def messages_prompt(model: ChatModel, body: dict[str, Any]) -> None:
    request = checked(MessagesRequest, parse_object(json.dumps(body).encode()))
    anthropic.to_message(request).SerializeToString()
    model.prepare(anthropic.to_chat(request))


Prompt = Callable[[ChatModel, dict[str, Any]], None]


def serve_or_refuse(prompt: Prompt, model: ChatModel, body: dict[str, Any]) -> None:
    try:
        prompt(model, body)
    except InvalidRequest as error:
        refusal = error
    else:
        return
    assert refusal.field or isinstance(refusal, HttpRefusal)  # what is no JSON has no fields
    assert len(orjson.dumps(openai_error(refusal, "req-1"))) < 2000


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=change(RESPONSES))
def test_any_response_is_served_or_refused(model: ChatModel, body: dict[str, Any]) -> None:
    serve_or_refuse(responses_prompt, model, body)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(body=change(MESSAGES))
def test_any_message_is_served_or_refused(model: ChatModel, body: dict[str, Any]) -> None:
    serve_or_refuse(messages_prompt, model, body)


def test_the_bodies_themselves_are_served(model: ChatModel) -> None:
    responses_prompt(model, RESPONSES)
    messages_prompt(model, MESSAGES)
