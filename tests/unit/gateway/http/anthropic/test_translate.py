"""Requests of the Messages API become Baton's."""

from typing import Any

import orjson
import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.anthropic.translate import to_chat, to_message
from baton.gateway.http.checking import checked
from baton.gateway.text.chat.types import ChatRequest, NamedTool

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
USER = {"role": "user", "content": "Hello"}


def request(**body: Any) -> MessagesRequest:
    return checked(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [USER], **body})


def chat(**body: Any) -> ChatRequest:
    return to_chat(request(**body))


def talk(*messages: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    return [dict(message) for message in chat(messages=list(messages), **body).messages]


def refusal(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        chat(**body)
    return raised.value


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def test_the_system_prompt_comes_first() -> None:
    assert talk(USER, system="Be kind.")[0] == {"role": "system", "content": "Be kind."}
    assert talk(USER, system=[text("Be kind."), text("Be brief.")])[0]["content"] == [
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": "Be brief."},
    ]
    assert talk(USER, system=[]) == [USER]
    assert talk(USER, {"role": "system", "content": "Now in French."}, USER)[1]["role"] == "system"


def test_results_of_tools_become_messages_before_the_text() -> None:
    turns: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "A call.", "signature": "s"},
            {"type": "redacted_thinking", "data": "xyz"},
            text("I look."),
            CALL,
            {**CALL, "id": "toolu_2"},
        ]},
        {"role": "user", "content": [
            RESULT,
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("city")], "is_error": True},
            text("And now?"),
        ]},
    ]  # fmt: skip
    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert talk(*turns) == [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A call.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": function},
                {"id": "toolu_2", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": "toolu_2",
            "content": [
                {"type": "text", "text": "Error:"},
                {"type": "text", "text": "no"},
                {"type": "text", "text": "city"},
            ],
        },
        {"role": "user", "content": "And now?"},
    ]


def test_a_failed_tool_says_so() -> None:
    def result(**fields: object) -> object:
        block = {"type": "tool_result", "tool_use_id": "toolu_1", **fields}
        answer = {"role": "assistant", "content": [CALL]}
        return talk(USER, answer, {"role": "user", "content": [block]})[2]["content"]

    assert result(is_error=True, content="timeout") == "Error: timeout"
    assert result(is_error=False) == ""


def test_a_conversation_that_ends_with_the_assistant_is_continued() -> None:
    begun = chat(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert begun.continue_final_message
    assert begun.messages[-1]["content"] == "The answer is ("
    assert not chat().continue_final_message
    empty = chat(messages=[USER, {"role": "assistant", "content": []}])
    assert not empty.continue_final_message
    assert empty.messages == [USER]


@pytest.mark.parametrize(
    ("field", "messages"),
    [
        ("messages[0].content[0].tool_use_id", [{"role": "user", "content": [RESULT]}]),
        ("messages[0].content[1]", [{"role": "user", "content": [text("a"), RESULT]}]),
        ("messages[0].content[0].type", [{"role": "user", "content": [CALL]}]),
        ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]),
        ("messages[0].content[0].type", [{"role": "system", "content": [RESULT]}]),
        ("messages[1].content[0].type", [USER, {"role": "assistant", "content": [RESULT]}]),
        ("messages[1].content", [USER, {"role": "assistant", "content": [CALL]}]),
        ("messages", [{"role": "assistant", "content": ""}]),
    ],
)
def test_blocks_without_sense_are_refused(field: str, messages: list[dict[str, Any]]) -> None:
    error = refusal(messages=messages)
    assert error.field == field
    assert error.cure


def test_tools_get_the_shape_of_chat_completions() -> None:
    function = {"name": "weather", "description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    assert chat(tools=[WEATHER]).tools == [{"type": "function", "function": function}]
    strict = chat(tools=[{**WEATHER, "type": "custom", "strict": True}]).tools[0]["function"]
    assert strict["strict"] is True


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, NamedTool("weather")),
    ],
)
def test_tool_choice_is_translated(choice: dict[str, Any], expected: object) -> None:
    assert chat(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_one_call_at_a_time_is_translated() -> None:
    assert chat(tools=[WEATHER]).parallel_tool_calls
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert not chat(tools=[WEATHER], tool_choice=single).parallel_tool_calls


def test_a_tool_choice_without_its_tool_is_refused() -> None:
    assert refusal(tool_choice={"type": "any"}).field == "tool_choice"
    assert refusal(tools=[WEATHER], tool_choice={"type": "tool", "name": "x"}).field == "tool_choice.name"


def test_thinking_and_effort_set_the_templates_variables() -> None:
    on, off = {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False}
    assert chat(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}).template_kwargs == on
    assert chat(thinking={"type": "adaptive"}).template_kwargs == on
    assert chat(thinking={"type": "disabled"}).template_kwargs == off
    assert chat().template_kwargs == {}
    assert chat(output_config={"effort": "high"}).template_kwargs == {"reasoning_effort": "high", **on}
    both = chat(output_config={"effort": "high"}, thinking={"type": "disabled"}).template_kwargs
    assert both == {"reasoning_effort": "high", **off}


def test_a_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    grammar = chat(output_config={"format": {"type": "json_schema", "schema": schema}}).grammar
    assert grammar == Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode())


def test_sampling_has_only_what_was_given() -> None:
    sampling = to_message(request()).sampling
    assert [descriptor.name for descriptor, _ in sampling.ListFields()] == ["max_tokens"]
    full = to_message(request(stop_sequences=["a", "b"], temperature=0, top_p=0.5, top_k=3, seed=1)).sampling
    assert (full.max_tokens, full.top_p, full.top_k, full.seed, list(full.stop)) == (9, 0.5, 3, 1, ["a", "b"])
    assert full.HasField("temperature")


def test_a_budget_that_leaves_no_answer_is_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        to_message(request(max_tokens=1024, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert raised.value.field == "thinking.budget_tokens"
