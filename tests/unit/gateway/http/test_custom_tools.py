"""Custom tools of chat completions: the model sees functions, and the client gets the inputs as texts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.body_reader import parse
from baton.gateway.http.chunks import ChatChunks, StreamShape
from baton.gateway.http.custom_tools import CustomTools, custom_tools
from baton.gateway.http.tool_calls import whole_call
from baton.gateway.http.translate import chat_request
from baton.gateway.text.chat.types import NamedTool
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.http_gateway import open_http_gateway
from tests.unit.gateway.http.test_chunks import events
from tests.unit.gateway.http.tokens import chat, last

USER = {"role": "user", "content": "hi"}
FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /a+/"}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": FORMAT}}
NOTE = {"type": "custom", "custom": {"name": "note"}}
SEEK = {"type": "function", "function": {"name": "seek", "parameters": {"type": "object"}}}
CHOICE = {"type": "custom", "custom": {"name": "patch"}}
BOTH = CustomTools({"patch": Grammar(GrammarKind.LARK, "start: /a+/"), "note": None})
RAW = CustomTools(BOTH.grammars, "patch", "tools[0]")


def body(**fields: object) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [USER], **fields}).encode())


def found(**fields: object) -> CustomTools:
    asked = body(**fields)
    return custom_tools(asked.tools, asked.tool_choice)


def stream(custom: CustomTools) -> ChatChunks:
    return ChatChunks(StreamShape("chunk", "chatcmpl-1", 100, "m", "r", custom_tools=custom))


def joined(data: bytes) -> tuple[list[Mapping[str, Any]], str, str]:
    """The calls of a stream's only choice, their pieces put together as clients do; the content; the finish reason."""
    calls: dict[int, dict[str, Any]] = {}
    content, finish = "", ""
    for event in events(data):
        (choice,) = event["choices"]
        content += choice["delta"].get("content", "")
        finish = choice["finish_reason"] or finish
        for piece in choice["delta"].get("tool_calls", ()):
            kind = "custom" if "custom" in piece else "function"
            text = "input" if kind == "custom" else "arguments"
            if piece["index"] not in calls:
                calls[piece.pop("index")] = piece
            else:
                calls[piece["index"]][kind][text] += piece[kind][text]
    return list(calls.values()), content, finish


def called(index: int, arguments: str, *, id: str = "", name: str = "") -> pb.GenerateResponse:
    return chat(tool_calls=[pb.ToolCallDelta(index=index, id=id, name=name, arguments=arguments)])


CALLS = (
    called(0, '{"in', id="c0", name="patch"),
    called(0, 'put": "one\\'),
    called(0, 'ntwo"}'),
    called(1, "{}", id="c1", name="seek"),
    called(2, '{"text": "not as asked"}', id="c2", name="note"),
)
INPUT = (called(0, '{"input"', id="c0", name="patch"), called(0, ': "a'))
INPUT_WRITTEN = {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": '{"input": "a'}}
WRITTEN = [
    {"id": "c0", "type": "custom", "custom": {"name": "patch", "input": "one\ntwo"}},
    {"id": "c1", "type": "function", "function": {"name": "seek", "arguments": "{}"}},
    {"id": "c2", "type": "custom", "custom": {"name": "note", "input": "not as asked"}},
]


def test_the_model_sees_a_function_with_one_text() -> None:
    first, second, third = chat_request(body(tools=[PATCH, NOTE, SEEK])).tools
    assert (first["type"], first["function"]["name"], first["function"]["description"]) == (
        "function", "patch", "Edits.",
    )  # fmt: skip
    assert "start: /a+/" in first["function"]["parameters"]["properties"]["input"]["description"]
    assert second["function"]["parameters"]["required"] == ["input"]
    assert third == SEEK


def test_earlier_calls_are_calls_of_the_function() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "patch", "input": 'a"b'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "ok"},
    ]
    (earlier,) = chat_request(body(messages=messages)).messages[1]["tool_calls"]
    assert earlier == {
        "id": "1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a\\"b"}'}
    }  # fmt: skip


@pytest.mark.parametrize(
    "fields", [{"tools": [PATCH, SEEK], "tool_choice": CHOICE}, {"tools": [PATCH], "tool_choice": "required"}]
)
def test_the_only_tool_with_a_grammar_gets_the_output_as_its_input(fields: dict[str, Any]) -> None:
    asked = chat_request(body(**fields))
    assert asked.raw_tool == "patch"
    assert asked.grammar == Grammar(GrammarKind.LARK, "start: /a+/")
    custom = found(**fields)
    assert (custom.raw_tool, custom.grammar_field) == ("patch", "tools[0].custom.format.grammar.definition")
    assert not custom.warnings


def test_a_tool_without_a_grammar_is_forced_as_a_function() -> None:
    asked = chat_request(body(tools=[NOTE, PATCH], tool_choice={"type": "custom", "custom": {"name": "note"}}))
    assert (asked.tool_choice, asked.raw_tool, asked.grammar) == (NamedTool("note"), "", None)


def test_a_grammar_that_is_not_enforced_is_named() -> None:
    expected = ["tools: the grammar of patch is enforced only if tool_choice names the tool"]
    assert found(tools=[PATCH, NOTE]).warnings == expected
    assert found(tools=[PATCH, SEEK], tool_choice="required").warnings == expected
    assert not found(tools=[NOTE]).warnings


def test_calls_stream_their_texts_and_a_whole_answer_has_the_same() -> None:
    encoder = stream(BOTH)
    streamed = joined(b"".join(map(encoder.push, (*CALLS, last()))))
    assert streamed == (WRITTEN, "", "tool_calls")
    assert whole(CALLS, BOTH) == WRITTEN


def whole(messages: Sequence[pb.GenerateResponse], custom: CustomTools) -> list[dict[str, Any]]:
    calls: dict[int, pb.ToolCallDelta] = {}
    for piece in (piece for message in messages for piece in message.chat.tool_calls):
        if piece.id:
            calls[piece.index] = pb.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name)
        calls[piece.index].arguments += piece.arguments
    return [whole_call(call, custom) for call in calls.values()]


@pytest.mark.parametrize(
    ("messages", "custom", "written", "had"),
    [
        *((CALLS, BOTH, WRITTEN, had) for had in range(1, len(CALLS) + 1)),
        *((INPUT, RAW, [INPUT_WRITTEN], had) for had in range(1, len(INPUT) + 1)),
    ],
)
def test_a_stream_that_goes_on_elsewhere_has_the_rest_of_the_texts(
    messages: Sequence[pb.GenerateResponse], custom: CustomTools, written: object, had: int
) -> None:
    encoder, again = stream(custom), stream(custom)
    first = b"".join(map(encoder.push, messages[:had]))
    for message in messages[:had]:
        again.skip(message)
    rest = b"".join(map(again.push, (*messages[had:], last())))
    assert joined(first + rest) == (written, "", "tool_calls")


def test_an_output_that_is_an_input_is_written_as_it_comes() -> None:
    encoder = stream(RAW)
    assert joined(b"".join(map(encoder.push, (*INPUT, last())))) == ([INPUT_WRITTEN], "", "tool_calls")
    assert whole(INPUT, RAW) == [INPUT_WRITTEN]


def test_each_choice_has_its_own_input() -> None:
    encoder = stream(RAW)
    pieces = [called(0, '{"', id="c0", name="patch"), called(0, "b", id="c1", name="patch"), called(0, "c")]
    pieces[1].index = 1
    choices = [event["choices"][0] for event in events(b"".join(map(encoder.push, pieces)))]
    texts = [(choice["index"], choice["delta"]["tool_calls"][0]["custom"]["input"]) for choice in choices]
    assert texts == [(0, '{"'), (1, "b"), (0, "c")]


def custom(**fields: object) -> dict[str, object]:
    return {"type": "custom", "custom": {"name": "a", **fields}}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [custom(name="a b")]}, "tools[0].custom.name"),
        ({"tools": [custom(format={"type": "bnf"})]}, "tools[0].custom.format.type"),
        (
            {"tools": [custom(format={"type": "grammar", "grammar": {"syntax": "bnf"}})]},
            "tools[0].custom.format.grammar.syntax",
        ),
        ({"tools": [SEEK, {"type": "mcp"}]}, "tools[1].type"),
        ({"tools": [NOTE, NOTE]}, "tools[1].custom.name"),
        ({"tools": [SEEK], "tool_choice": CHOICE}, "tool_choice.custom.name"),
        ({"tools": [PATCH], "tool_choice": custom(name=["patch"])}, "tool_choice.custom.name"),
        ({"tools": [PATCH], "tool_choice": {"type": ["custom"]}}, "tool_choice.type"),
        ({"tools": [PATCH], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [custom()]}]}, "messages[1].tool_calls[0].custom"),
    ],
)
def test_a_wrong_part_is_refused_by_its_name(fields: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_request(body(**fields))
    assert caught.value.field == wrong


async def test_tokens_of_a_conversation_with_custom_tools_are_counted() -> None:
    async with open_http_gateway() as door:
        counts = []
        for tools in ([], [PATCH]):
            asked = {"messages": [USER], "tools": tools}
            answer = await door.call("POST", "/tokenize", asked, content_type="application/json")
            assert answer.status == 200
            counts.append(answer.json["count"])
    assert counts[0] < counts[1]
