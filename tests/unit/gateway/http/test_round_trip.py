"""Every API accepts the tool calls that any of them returned, broken ones too, as the history of the next request."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from baton.gateway.http.answer_parts import OutputParts
from baton.gateway.http.anthropic.answer import MessageObject, MessageStream
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.anthropic.translate import to_chat as messages_chat
from baton.gateway.http.bodies import ChatBody
from baton.gateway.http.body_reader import parse_object
from baton.gateway.http.checking import checked
from baton.gateway.http.chunks import ChatChunks, StreamShape
from baton.gateway.http.responses.answer import Identity, ResponseObject
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.stream import ResponsesStream
from baton.gateway.http.responses.translate import to_chat as responses_chat
from baton.gateway.http.translate import chat_request
from baton.gateway.serving.collected import AnswerCollector
from baton.gateway.serving.output_run import ChatOutput
from baton.gateway.text.chat.json_request import chat_of_message
from baton.gateway.text.chat.model import ChatModel, read_chat_model
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.chat.checkpoints import TEMPLATES, tool, write_checkpoint
from tests.unit.gateway.http.chat_stream import events

BEGIN, END = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
V3 = f"{BEGIN}function<｜tool▁sep｜>f\n```json\n{{}}\n```{END}"
V31 = f"{BEGIN}f<｜tool▁sep｜>{{}}{END}"
# How each family writes a call of `f`, around its arguments.
FAMILIES = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "mistral": "[TOOL_CALLS]f[ARGS]{}",
    "mistral-array": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "deepseek-v3": V3,
    "deepseek-v3.1": V31,
    "r1": "Hm.</think>" + V3,
    "llama": '{"name": "f", "parameters": {}}',
    "llama-pythonic": "[f(a={})]",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
    "qwen-xml": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
}
ARGUMENTS = {
    "whole": '{"a": "é\\n\\ud83d\\ude00", "b": [1, 2.5, null, true]}',
    "nothing": "{}",
    "trailing comma": '{"a": [1, 2,], }',
    "raw line break": '{"a": "one\ntwo\t\x01"}',
    "wrong escape": '{"a": "\\d \\u12 C:\\new"}',
    "half a character": '{"a": "\\ud83d", "b": "\\ude00"}',
    "not finite": '{"a": NaN, "b": -Infinity, "c": 1e999}',
    "long numbers": '{"a": 123456789012345678901234567890, "b": ' + "9" * 5000 + "}",
    "Python": "{'a': True, 'b': None, \"c\": 'it\\'s'}",
    "no quotes": "{a: New York, b: 007}",
    "quotes in a string": '{"a": "say "hi" now"}',
    "missing bracket": '{"a": [1, {"b": 2}',
    "surplus brackets": '{"a": 1}}]}',
    "no value": '{"a": , "b"}',
    "twice": '{"a": 1}{"a": 2}',
    "the same key": '{"a": 1, "a": 2}',
    "no object": "[1, 2]",
    "a string": '"{\\"a\\": 1}"',
    "text": "Rome & <b>",
    "null": "null",
    "deep": '{"a": ' + "[" * 600 + "]" * 600 + "}",
    "empty": "",
}  # fmt: skip
# How a template renders a call's arguments.
RENDERINGS = {
    "as JSON": "{{ f.arguments | tojson }}",
    "by member": "{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
    "as a string": "{{ 'x' + f.arguments }}",
}
CALLS = "{% for m in messages %}{% for t in m.tool_calls or [] %}{% set f = t.function %}(%s){% endfor %}{% endfor %}"
TOOL = tool("f", {"type": "object", "properties": {"a": {"type": ["object", "array", "integer"]}}})
ASK = {"role": "user", "content": "Go"}
LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP


@dataclass
class Turn:
    """An assistant's turn as a client has it.

    Attributes:
        items: for the history.
        arguments: of its calls, as JSON.
    """

    items: list[dict[str, Any]]
    arguments: list[str] = field(default_factory=list)


def messages_of(model: ChatModel, text: str, reason: "common_pb2.FinishReason.ValueType") -> list[pb.GenerateResponse]:
    request = ChatRequest([ASK], tools=[TOOL])
    output = ChatOutput(model.parser(request, model.prepare(request), "seed"))
    ended = pb.GenerateResponse(text="", finish_reason=reason)
    pieces = [pb.GenerateResponse(text=text[start : start + 3]) for start in range(0, len(text), 3)]
    return [made for message in [*pieces, ended] for made in output.messages(message)]


def chat_whole(messages: list[pb.GenerateResponse]) -> Turn:
    collector = AnswerCollector()
    for message in messages:
        collector.push(message)
    chat = collector.response().outputs[0].chat
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in chat.tool_calls
    ]
    return chat_turn(chat.content or None if calls else chat.content, chat.reasoning, calls)


def chat_turn(content: str | None, reasoning: str, calls: list[dict[str, Any]]) -> Turn:
    item: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        item["reasoning_content"] = reasoning
    if calls:
        item["tool_calls"] = calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    return Turn([item, *results], [call["function"]["arguments"] for call in calls])


def chat_streamed(messages: list[pb.GenerateResponse]) -> Turn:
    stream = ChatChunks(StreamShape("chat.completion.chunk", "id", 1, "m", "r"))
    written = b"".join(stream.push(message) for message in messages)
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for line in written.decode().split("\n\n")[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            content += choice["delta"].get("content", "")
            reasoning += choice["delta"].get("reasoning_content", "")
            for piece in choice["delta"].get("tool_calls", ()):
                if piece.get("id"):
                    calls.append({key: piece[key] for key in ("id", "type", "function")})
                else:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return chat_turn(content, reasoning, calls)


def responses_whole(messages: list[pb.GenerateResponse]) -> Turn:
    response = response_object()
    answer = response.answer()
    for message in messages:
        answer.push(message)
    return responses_turn(json.loads(response.ended(answer))["output"])


def responses_streamed(messages: list[pb.GenerateResponse]) -> Turn:
    stream = ResponsesStream(response_object())
    written = events(b"".join(stream.push(message) for message in messages) + stream.finish())
    return responses_turn(written[-1].data["response"]["output"])


def response_object() -> ResponseObject:
    return ResponseObject(checked(ResponsesRequest, {"model": "m", "input": "x"}), Identity("k", "m", 1))


def responses_turn(items: list[dict[str, Any]]) -> Turn:
    calls = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in calls]
    return Turn([*items, *results], [call["arguments"] for call in calls])


def messages_whole(messages: list[pb.GenerateResponse]) -> Turn:
    answer = OutputParts()
    for message in messages:
        answer.push(message)
    blocks = json.loads(MessageObject("msg", "m", 10).ended(answer))["content"]
    return messages_turn(blocks, [part.text for part in answer.parts if part.kind == "tool_call"])


def messages_streamed(messages: list[pb.GenerateResponse]) -> Turn:
    stream = MessageStream(MessageObject("msg", "m", 10), "r")
    written = events(b"".join(stream.push(message) for message in messages) + stream.finish())
    blocks: list[dict[str, Any]] = []
    for event in written:
        if event.name == "content_block_start":
            blocks.append({**event.data["content_block"], "json": ""})
        elif event.name == "content_block_delta":
            delta = event.data["delta"]
            key = {"input_json_delta": "json", "signature_delta": "signature"}.get(delta["type"], delta["type"][:-6])
            blocks[-1][key] += delta[{"json": "partial_json"}.get(key, key)]
    arguments = [block["json"] for block in blocks if block["type"] == "tool_use"]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":  # a client keeps what it can read
            block["input"] = as_object(text)
    return messages_turn(blocks, arguments)


def as_object(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def messages_turn(blocks: list[dict[str, Any]], arguments: list[str]) -> Turn:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "ok"} for call in calls]
    return Turn([{"role": "assistant", "content": blocks}, {"role": "user", "content": [*results, TEXT]}], arguments)


TEXT = {"type": "text", "text": "Go on"}


def chat_back(turn: Turn) -> ChatRequest:
    return chat_request(checked(ChatBody, sent({"model": "m", "messages": [ASK, *turn.items, ASK]})))


def grpc_back(turn: Turn) -> ChatRequest:
    return chat_of_message(pb.Chat(messages_json=json.dumps([ASK, *turn.items, ASK])))


def responses_back(turn: Turn) -> ChatRequest:
    return responses_chat(checked(ResponsesRequest, sent({"model": "m", "input": [ASK, *turn.items, ASK]})))


def messages_back(turn: Turn) -> ChatRequest:
    return messages_chat(
        checked(MessagesRequest, sent({"model": "m", "max_tokens": 9, "messages": [ASK, *turn.items]}))
    )


def sent(body: dict[str, Any]) -> Any:
    """As a client writes it and the gateway reads it."""
    return parse_object(json.dumps(body).encode())


Leave = Callable[[list[pb.GenerateResponse]], Turn]
Return = Callable[[Turn], ChatRequest]
DOORS: dict[str, tuple[Leave, Leave, tuple[Return, ...]]] = {
    "chat": (chat_whole, chat_streamed, (chat_back, grpc_back)),
    "responses": (responses_whole, responses_streamed, (responses_back,)),
    "messages": (messages_whole, messages_streamed, (messages_back,)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ChatModel]:
    def make(family: str, rendering: str) -> ChatModel:
        folder: Path = tmp_path_factory.mktemp(family)
        write_checkpoint(folder, TEMPLATES[family] + CALLS.replace("%s", RENDERINGS[rendering]))
        return read_chat_model(folder, None)

    return cache(make)


def outputs(family: str) -> Iterator[tuple[str, bool]]:
    """Texts, and whether they were cut off."""
    yield "", False
    yield "Hello", True
    for arguments in ARGUMENTS.values():
        text = FAMILIES[family].replace("{}", arguments, 1)
        yield text, False
        if len(text) < 1000:
            for end in range(len(text) // 4, len(text), 1 + len(text) // 8):
                yield text[:end], True
    text = FAMILIES[family].replace("{}", ARGUMENTS["not finite"], 1)
    for end in range(len(text)):
        yield text[:end], True


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_leaves_by_a_door_comes_back_in(family: str, door: str, models: Callable[[str, str], ChatModel]) -> None:
    whole, streamed, returns = DOORS[door]
    for text, cut in outputs(family):
        made = messages_of(models(family, "as JSON"), text, LENGTH if cut else STOP)
        turns = (whole(made), streamed(made))
        assert turns[0].arguments == turns[1].arguments, text
        for turn in turns:
            for back in returns:
                back(turn)


@pytest.mark.parametrize("rendering", RENDERINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_renders_what_came_back(
    family: str, rendering: str, models: Callable[[str, str], ChatModel]
) -> None:
    model = models(family, rendering)
    for text, cut in outputs(family):
        made = messages_of(model, text, LENGTH if cut else STOP)
        prompt = model.prepare(chat_back(chat_whole(made))).prompt
        assert prompt.count("(") >= len(chat_whole(made).arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_a_call_that_the_model_ended_are_valid_json(
    family: str, models: Callable[[str, str], ChatModel]
) -> None:
    for text, _ in outputs(family):
        for arguments in chat_whole(messages_of(models(family, "as JSON"), text, STOP)).arguments:
            value = json.loads(arguments, parse_constant=not_json)
            assert "inf" not in repr(value)


def not_json(constant: str) -> object:
    raise AssertionError(constant)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("", "{}"),
        ('{"city": "Ro', '{"city": "Ro"}'),
        ('{"a": tr', '{"a": true}'),
        ('{"a": [1, 2,], }', '{"a": [1, 2]}'),
        ('{"a": "one\ntwo"}', '{"a": "one\\ntwo"}'),
        ('{"a": NaN, "b": 1e999}', '{"a": null, "b": null}'),
        ("{'a': True}", '{"a": true}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
        ("[1]", '{"arguments": "[1]"}'),
        ("Rome", '{"arguments": "Rome"}'),
        ("9" * 5000, '{"arguments": "' + "9" * 5000 + '"}'),
        ("[" * 100_000, '{"arguments": "' + "[" * 100_000 + '"}'),
    ],
)
def test_a_client_may_send_any_string_as_arguments_which_are_read_as_well_as_can_be(
    arguments: str, expected: str, models: Callable[[str, str], ChatModel]
) -> None:
    model = models("hermes", "as JSON")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    chat = Turn([{"role": "assistant", "content": None, "tool_calls": [call]}])
    for request in (chat_back(chat), grpc_back(chat), responses_back(Turn([item]))):
        assert f"({expected})" in model.prepare(request).prompt
