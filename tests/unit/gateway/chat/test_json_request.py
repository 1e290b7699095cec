"""Conversations as JSON: what is taken, and how wrong shapes are named."""

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.json_request import chat_of_message, chat_request
from baton.gateway.text.chat.types import NamedTool
from baton.protos.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def with_message(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, message]}


def with_schema(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_a_whole_conversation_is_taken() -> None:
    grammar = Grammar(GrammarKind.JSON_OBJECT)
    request = chat_request(
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": "me"},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
                {"role": "tool", "tool_call_id": "c1", "content": "20"},
                {"role": "assistant", "content": None, "refusal": "No."},
                {"role": "assistant"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "t", "text": "x"}],
            "reasoning_effort": "low",
            "chat_template": "tool_use",
            "continue_final_message": True,
            "temperature": 1,
        },
        grammar,
    )
    assert [message["content"] for message in request.messages] == [
        [{"type": "text", "text": "Be brief."}], "Hi", None, "20", "No.", "",
    ]  # fmt: skip
    assert request.messages[2]["tool_calls"] == [CALL]
    assert request.tools == [TOOL]
    assert request.tool_choice == NamedTool("f")
    assert not request.parallel_tool_calls
    assert request.continue_final_message
    assert request.add_generation_prompt is None
    assert request.template == "tool_use"
    assert request.grammar is grammar
    assert request.template_kwargs == {
        "enable_thinking": False,
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "low",
    }


@pytest.mark.parametrize(
    ("body", "choice"),
    [({}, "none"), ({"tools": [TOOL]}, "auto"), ({"tools": [TOOL], "tool_choice": "required"}, "required")],
)
def test_tool_choice_is_auto_where_there_are_tools(body: dict[str, Any], choice: str) -> None:
    assert chat_request({"messages": [USER], **body}).tool_choice == choice


def test_a_part_may_be_of_the_responses_api_or_a_refusal() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    content = chat_request(with_message(role="user", content=parts)).messages[1]["content"]
    assert [part["text"] for part in content] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        (with_message(content="x"), "messages[1].role"),
        (with_message(role="function", content="x"), "messages[1].role"),
        (with_message(role="bot", content="x"), "messages[1].role"),
        (with_message(role="user"), "messages[1].content"),
        (with_message(role="user", content=3), "messages[1].content"),
        (with_message(role="user", content={"text": "x"}), "messages[1].content"),
        (with_message(role="user", content=[3]), "messages[1].content[0]"),
        (with_message(role="user", content=[{"text": "x"}]), "messages[1].content[0].type"),
        (
            with_message(role="user", content=[{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]),
            "messages[1].content[1].type",
        ),
        (with_message(role="user", content=[{"type": []}]), "messages[1].content[0].type"),
        (with_message(role="user", content=[{"type": "text"}]), "messages[1].content[0].text"),
        (with_message(role="user", content="x", name=1), "messages[1].name"),
        (with_message(role="tool", content="x", tool_call_id=1), "messages[1].tool_call_id"),
        (with_message(role="user", content="x", tool_calls=[CALL]), "messages[1].tool_calls"),
        (with_message(role="assistant", tool_calls={}), "messages[1].tool_calls"),
        (with_message(role="assistant", tool_calls=[{"type": "x"}]), "messages[1].tool_calls[0].type"),
        (with_message(role="assistant", tool_calls=[{}]), "messages[1].tool_calls[0].function"),
        (with_message(role="assistant", tool_calls=[{"function": {}}]), "messages[1].tool_calls[0].function.name"),
        (
            with_message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": 1}}]),
            "messages[1].tool_calls[0].function.arguments",
        ),
        (with_message(role="assistant", function_call={}), "messages[1].function_call"),
        ({"messages": [USER], "functions": []}, "functions"),
        ({"messages": [USER], "function_call": "auto"}, "function_call"),
        ({"messages": [USER], "tools": {}}, "tools"),
        ({"messages": [USER], "tools": [{}]}, "tools[0].type"),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"messages": [USER], "tools": [with_schema(properties=[])]}, "tools[0].function.parameters.properties"),
        ({"messages": [USER], "tools": [with_schema(required=[[]])]}, "tools[0].function.parameters.required[0]"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"messages": [USER], "tool_choice": "any"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": 1}, "tool_choice"),
        ({"messages": [USER], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        ({"messages": [USER], "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"messages": [USER], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [USER], "chat_template": {}}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": [USER], "documents": {}}, "documents"),
        ({"messages": [USER], "documents": ["x"]}, "documents[0]"),
        ({"messages": [USER], "continue_final_message": "yes"}, "continue_final_message"),
        ({"messages": [USER], "reasoning_effort": 3}, "reasoning_effort"),
    ],
)
def test_a_wrong_shape_is_refused_by_the_fields_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(body)
    assert caught.value.field == field


def test_the_deprecated_functions_are_refused_with_the_cure() -> None:
    with pytest.raises(InvalidRequest, match="use tools"):
        chat_request({"messages": [USER], "functions": [{}]})


def test_a_grpc_chat_is_taken() -> None:
    chat = pb.Chat(
        messages_json=json.dumps([USER]),
        tools_json=json.dumps([TOOL]),
        tool_choice_json='"required"',
        template_kwargs_json='{"a": 1}',
        parallel_tool_calls=False,
        add_generation_prompt=False,
    )
    request = chat_of_message(chat)
    assert (request.messages, request.tools, request.tool_choice) == ([USER], [TOOL], "required")
    assert (request.template_kwargs, request.parallel_tool_calls) == ({"a": 1}, False)
    assert request.add_generation_prompt is False
    assert chat_of_message(pb.Chat(messages_json=json.dumps([USER]), tool_choice_json="none")).tool_choice == "none"


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (pb.Chat(), "messages"),
        (pb.Chat(messages_json="["), "messages"),
        (pb.Chat(messages_json="[" * 100_000), "messages"),
        (pb.Chat(messages_json="[]", tools_json="[NaN]"), "tools"),
        (pb.Chat(messages_json="[]", tool_choice_json="maybe"), "tool_choice"),
        (pb.Chat(messages_json=json.dumps([USER]), template_kwargs_json="3"), "chat_template_kwargs"),
    ],
)
def test_a_grpc_chat_that_is_no_json_is_refused(chat: pb.Chat, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_of_message(chat)
    assert caught.value.field == field
