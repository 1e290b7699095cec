"""Custom tools of chat completions: the model sees functions, and the client gets the inputs as texts."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.types import Grammar, GrammarKind
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.body_reader import parse
from baton.gateway.http.chunks import ChatChunks, StreamShape
from baton.gateway.http.custom_tools import CustomTools, custom_tools
from baton.gateway.http.tool_calls import whole_calls
from baton.gateway.http.translate import chat_request
from baton.gateway.text.chat.types import NamedTool
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.http_gateway import open_http_gateway
from tests.unit.gateway.http.test_chunks import events
from tests.unit.gateway.http.tokens import LENGTH, chat, last

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
    assert asked.is_raw_input
    assert asked.grammar == Grammar(GrammarKind.LARK, "start: /a+/")
    custom = found(**fields)
    assert (custom.raw_tool, custom.grammar_field) == ("patch", "tools[0].custom.format.grammar.definition")
    assert not custom.warnings


def test_a_tool_without_a_grammar_is_forced_as_a_function() -> None:
    asked = chat_request(body(tools=[NOTE, PATCH], tool_choice={"type": "custom", "custom": {"name": "note"}}))
    assert (asked.tool_choice, asked.is_raw_input, asked.grammar) == (NamedTool("note"), False, None)


def test_a_grammar_that_is_not_enforced_is_named() -> None:
    expected = ["tools: the grammar of patch is enforced only if tool_choice names the tool"]
    assert found(tools=[PATCH, NOTE]).warnings == expected
    assert found(tools=[PATCH, SEEK], tool_choice="required").warnings == expected
    assert not found(tools=[NOTE]).warnings


def test_calls_stream_their_texts_and_a_whole_answer_has_the_same() -> None:
    encoder = stream(BOTH)
    streamed = joined(b"".join(map(encoder.push, (*CALLS, last()))))
    assert streamed == (WRITTEN, "", "tool_calls")
    whole = pb.Output()
    for message in CALLS:
        for piece in message.chat.tool_calls:
            if piece.id:
                whole.chat.tool_calls.add(index=piece.index, id=piece.id, name=piece.name)
            whole.chat.tool_calls[piece.index].arguments += piece.arguments
    assert whole_calls(whole, BOTH, "chatcmpl-1") == WRITTEN


@pytest.mark.parametrize("had", range(1, len(CALLS) + 1))
def test_a_stream_that_goes_on_elsewhere_has_the_rest_of_the_texts(had: int) -> None:
    encoder, again = stream(BOTH), stream(BOTH)
    first = b"".join(map(encoder.push, CALLS[:had]))
    for message in CALLS[:had]:
        again.skip(message)
    rest = b"".join(map(again.push, (*CALLS[had:], last())))
    assert joined(first + rest) == (WRITTEN, "", "tool_calls")


def test_an_output_that_is_an_input_becomes_a_call() -> None:
    encoder = stream(RAW)
    pieces = [chat(reasoning="Hm."), chat("aa"), chat("a"), last()]
    (call,), content, finish = joined(b"".join(map(encoder.push, pieces)))
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "aaa"})
    assert (content, finish) == ("", "tool_calls")
    assert whole_calls(pb.Output(chat=pb.ChatDelta(content="aaa")), RAW, "chatcmpl-1") == [call]


def test_an_empty_input_is_a_call() -> None:
    (call,), content, finish = joined(stream(RAW).push(last()))
    assert (call["custom"], content, finish) == ({"name": "patch", "input": ""}, "", "tool_calls")
    assert whole_calls(pb.Output(finish_reason=common_pb2.FINISH_REASON_STOP), RAW, "chatcmpl-1") == [call]


def test_an_output_that_ends_before_its_input_begins_is_no_call() -> None:
    encoder = stream(RAW)
    assert joined(encoder.push(chat(reasoning="Hm.")) + encoder.push(last(LENGTH))) == ([], "", "length")
    assert whole_calls(pb.Output(finish_reason=LENGTH), RAW, "chatcmpl-1") == []


def test_each_choice_has_its_own_call() -> None:
    encoder = stream(RAW)
    pieces = [chat("a", index=0), chat("b", index=1), chat("c", index=0)]
    choices = [event["choices"][0] for event in events(b"".join(map(encoder.push, pieces)))]
    first, second, third = [choice["delta"]["tool_calls"][0] for choice in choices]
    assert first["id"] != second["id"]
    assert [each["custom"]["input"] for each in (first, second, third)] == ["a", "b", "c"]
    assert "id" not in third


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
        ({"tools": [PATCH], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
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
