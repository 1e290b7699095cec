"""What the Responses API refuses, and the field that it names."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.gateway.http.checking import checked
from baton.gateway.http.responses.models import ResponsesRequest

FUNCTION = {"type": "function", "name": "f"}
SPACE = {"type": "namespace", "name": "n"}
CUSTOM = {"type": "custom", "name": "c"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
USER = {"role": "user", "content": "Hi"}


def refused(body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        checked(ResponsesRequest, body)
    return raised.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("conversation", "conv_1"),
        ("background", True),
        ("prompt", {"id": "p"}),
        ("context_management", [{"type": "compaction"}]),
        ("moderation", {}),
    ],
)
def test_what_this_server_does_not_do_is_refused_with_the_cure(field: str, value: object) -> None:
    error = refused({"input": "a", field: value})
    assert error.field == field
    assert error.cure


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": True, "client_metadata": {"a": "b"}, "access_programs": {"cyber": "standard"}},
        {"store": False, "background": False, "previous_response_id": None, "conversation": None},
        {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s"},
        {"service_tier": "auto", "prompt_cache_key": "k", "max_tool_calls": 3},
        {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": True}},
        {"reasoning": {"effort": "high", "summary": "auto", "context": "auto"}, "text": {"verbosity": "low"}},
        {"truncation": "disabled", "parallel_tool_calls": False, "tools": [], "unknown": None},
    ],
)  # fmt: skip
def test_harmless_parameters_are_accepted(harmless: dict[str, Any]) -> None:
    checked(ResponsesRequest, {"input": "a", **harmless})


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": None}),
        ("input", {"input": 3}),
        ("input", {"input": []}),
        ("input", {"input": {"role": "user"}}),
        ("input[1]", {"input": [USER, 5]}),
        ("input[0].type", {"input": [{"type": "compaction_trigger"}]}),
        ("input[0].id", {"input": [{"type": "item_reference"}]}),
        ("input[0].type", {"input": [{"type": 3, "content": "x"}]}),
        ("input[0].type", {"input": [{"type": ["message"], "content": "x"}]}),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "critic", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content", {"input": [{"role": "user", "content": None}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{}]}]}),
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}),
        ("input[0].content[0].x", {"input": [{**USER, "content": [{"type": "input_text", "text": "", "x": 1}]}]}),
        ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("tools[0].type", {"input": "a", "tools": [{"type": "telepathy"}]}),
        ("tools[0].tools[1].type", {"input": "a", "tools": [{**SPACE, "tools": [FUNCTION, {}]}]}),
        ("tools[0].format.syntax", {"input": "a", "tools": [{**CUSTOM, "format": {**GRAMMAR, "syntax": "bnf"}}]}),
        ("tools[0].format.definition", {"input": "a", "tools": [{**CUSTOM, "format": {**GRAMMAR, "definition": ""}}]}),
        ("tools[0].name", {"input": "a", "tools": [{"type": "function", "name": "a b"}]}),
        ("tools[0].parameters", {"input": "a", "tools": [{**FUNCTION, "parameters": "x"}]}),
        ("tools[1].async", {"input": "a", "tools": [FUNCTION, {**FUNCTION, "async": True}]}),
        ("tool_choice", {"input": "a", "tool_choice": "maybe"}),
        ("tool_choice", {"input": "a", "tool_choice": 7}),
        ("tool_choice.type", {"input": "a", "tool_choice": {"type": "mcp"}}),
        ("text.format.type", {"input": "a", "text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"input": "a", "text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("reasoning.effort", {"input": "a", "reasoning": {"effort": "huge"}}),
        ("include[0]", {"input": "a", "include": ["everything"]}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 0}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 2**32}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": True}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 1.0}),
        ("temperature", {"input": "a", "temperature": "1"}),
        ("temperature", {"input": "a", "temperature": float("nan")}),
        ("top_logprobs", {"input": "a", "top_logprobs": 21}),
        ("metadata.a", {"input": "a", "metadata": {"a": 1}}),
        ("metadata.a", {"input": "a", "metadata": {"a": "x" * 513}}),
        ("logit_bias.x", {"input": "a", "logit_bias": {"x": 1}}),
        ("truncation", {"input": "a", "truncation": "maybe"}),
        ("stop", {"input": "a", "stop": 4}),
        ("stop[1]", {"input": "a", "stop": ["a", 4]}),
        ("stream", {"input": "a", "stream": "yes"}),
        ("temprature", {"input": "a", "temprature": 1}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_by_its_field(field: str, body: dict[str, Any]) -> None:
    assert refused(body).field == field


def test_messages_stay_short_whatever_was_sent() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    for value in ("x" * 10**6, [USER] * 10**5, deep, ["y"] * 10**5):
        error = refused({"input": "a", "tool_choice": value, "tools": [{"type": "function", "name": value}]})
        assert len(str(error)) < 500
    assert len(str(refused({"input": [{"type": "z" * 10**6}]}))) < 500
    assert len(refused({"input": "a", "k" * 10**6: 1}).field) < 500


def test_every_wrong_item_of_a_long_list_costs_no_message() -> None:
    error = refused({"input": ["not an item"] * 10**6})
    assert error.field == "input[0]"
