"""Requests of the Responses API become Baton's."""

from typing import Any

import orjson
import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.checking import checked
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.translate import to_chat, to_message
from baton.gateway.text.chat.types import ChatRequest, NamedTool

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}


def request(**body: Any) -> ResponsesRequest:
    return checked(ResponsesRequest, {"model": "m", "input": "Hello", **body})


def chat(**body: Any) -> ChatRequest:
    return to_chat(request(**body))


def refusal(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        chat(**body)
    return raised.value


def test_a_string_is_the_users_message() -> None:
    assert chat().messages == [{"role": "user", "content": "Hello"}]


def test_instructions_are_the_first_system_message_and_take_in_the_next() -> None:
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert chat(instructions="Be kind.", input=items).messages == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "Hi"},
    ]


def test_parts_stay_apart_and_a_single_one_becomes_text() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
        ]},
        {"role": "user", "content": []},
    ]  # fmt: skip
    assert chat(input=items).messages == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": []},
    ]


def test_one_turn_of_the_assistant_is_one_message() -> None:
    items = [
        {"role": "user", "content": "Weather and time?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Two calls."}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Sunny, noon."},
    ]  # fmt: skip
    assert chat(input=items).messages == [
        {"role": "user", "content": "Weather and time?"},
        {
            "role": "assistant",
            "reasoning_content": "Two calls.",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
                {"id": "c2", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "assistant", "content": "Sunny, noon."},
    ]


def test_two_answers_in_a_row_stay_two_messages() -> None:
    items = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [message["content"] for message in chat(input=items).messages] == ["a", "b"]


def test_reasoning_after_an_answer_begins_another_turn() -> None:
    items = [
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": "b"},
    ]
    assert chat(input=items).messages == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "reasoning_content": "why", "content": "b"},
    ]


def test_reasoning_that_only_its_maker_can_read_is_left_out() -> None:
    items = [{"type": "reasoning", "summary": [], "encrypted_content": "xyz"}, {"role": "user", "content": "Go on"}]
    assert chat(input=items).messages == [{"role": "user", "content": "Go on"}]


def test_an_output_without_its_call_is_refused() -> None:
    error = refusal(input=[{"type": "function_call_output", "call_id": "c9", "output": "x"}])
    assert error.field == "input[0].call_id"
    assert error.value == "c9"


def test_tools_get_the_shape_of_chat_completions() -> None:
    assert chat(tools=[WEATHER, TIME]).tools == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather of a city",
                "parameters": WEATHER["parameters"],
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "time"}},
    ]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_tool_choice_is_translated_by_mode(choice: str) -> None:
    assert chat(tools=[WEATHER], tool_choice=choice).tool_choice == choice


def test_tool_choice_by_name() -> None:
    chosen = chat(tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "time"})
    assert chosen.tool_choice == NamedTool("time")


def test_allowed_tools_leave_only_these() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
    chosen = chat(tools=[WEATHER, TIME], tool_choice=allowed)
    assert chosen.tool_choice == "required"
    assert [tool["function"]["name"] for tool in chosen.tools] == ["time"]


def test_a_tool_choice_without_its_tool_is_refused() -> None:
    assert refusal(tool_choice="required").field == "tool_choice"
    assert refusal(tools=[WEATHER], tool_choice={"type": "function", "name": "x"}).field == "tool_choice.name"
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}
    assert refusal(tools=[WEATHER], tool_choice=allowed).field == "tool_choice.tools[0].name"


def test_formats_become_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
    named = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    grammar = chat(text={"format": named}).grammar
    assert grammar == Grammar(GrammarKind.JSON_SCHEMA, orjson.dumps(schema).decode())
    assert chat(text={"format": {"type": "json_object"}}).grammar == Grammar(GrammarKind.JSON_OBJECT)
    assert chat(text={"format": {"type": "text"}}).grammar is None


def test_reasoning_effort_sets_the_templates_variables() -> None:
    assert chat(reasoning={"effort": "low", "summary": "auto"}).template_kwargs == {
        "reasoning_effort": "low", "enable_thinking": True, "thinking": True,
    }  # fmt: skip
    assert chat(reasoning={"effort": "none"}).template_kwargs == {"enable_thinking": False, "thinking": False}
    assert chat().template_kwargs == {}
    own = chat(reasoning={"effort": "low"}, chat_template_kwargs={"thinking": False}).template_kwargs
    assert own["thinking"] is False


def test_sampling_has_only_what_was_given() -> None:
    assert not to_message(request()).HasField("sampling") or not to_message(request()).sampling.ListFields()
    message = to_message(
        request(
            max_output_tokens=7, temperature=0, top_p=0.5, top_k=-1, seed=2**64 - 1, stop=["a", "b"], min_tokens=0,
            logit_bias={"5": -1}, cache_salt="tenant", priority=-3, ignore_eos=False, stop_token_ids=[4],
        )
    )  # fmt: skip
    sampling = message.sampling
    assert (message.model, message.cache_salt, message.priority) == ("m", "tenant", -3)
    assert (sampling.max_tokens, sampling.seed, sampling.top_k, sampling.top_p) == (7, 2**64 - 1, 0, 0.5)
    assert sampling.HasField("temperature")
    assert sampling.HasField("min_tokens")
    assert not sampling.HasField("min_p")
    assert list(sampling.stop) == ["a", "b"]
    assert dict(sampling.logit_bias) == {5: -1.0}
    assert list(to_message(request(stop="x")).sampling.stop) == ["x"]
    assert to_message(request(seed=-1)).sampling.seed == 2**64 - 1


def test_logprobs_are_asked_for_by_include_or_by_their_number() -> None:
    assert not to_message(request()).sampling.HasField("logprobs")
    assert to_message(request(include=["message.output_text.logprobs"])).sampling.logprobs == 0
    included = to_message(request(include=["message.output_text.logprobs"])).sampling
    assert included.HasField("logprobs")
    assert to_message(request(top_logprobs=4)).sampling.logprobs == 4
