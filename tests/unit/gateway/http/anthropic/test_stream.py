"""Streams, whole messages and errors of the Messages API, read with the types of Anthropic's client."""

from dataclasses import replace
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from baton.core.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    NoNode,
    Overloaded,
    UnknownModel,
)
from baton.gateway.http.answer_parts import OutputParts
from baton.gateway.http.anthropic.answer import MessageObject, MessageStream
from baton.gateway.http.anthropic.errors import anthropic_error
from baton.gateway.http.anthropic.models import MessagesRequest
from baton.gateway.http.checking import checked
from baton.gateway.http.errors import HttpRefusal
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.chat_stream import Event, called, chat_message, ended, events

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

OBJECT = MessageObject(id="msg_77", model="llama", max_tokens=7, stop_sequences=("END", "3"))
TEXT = [chat_message("Hel"), chat_message("lo\n\u2028"), ended(content="!")]
REASONED = [
    chat_message(reasoning="Hm", tokens=(1, 2)),
    chat_message(reasoning="m.", tokens=(3,)),
    chat_message("Yes"),
    ended(reasoning_tokens=3),
]
TOOLS = [
    chat_message("I look."),
    called(0, id="call_a", name="weather", arguments='{"city":'),
    called(0, arguments='"Rome"}'),
    called(1, id="call_b", name="time"),
    ended(),
]


def streamed(messages: list[pb.GenerateResponse], message: MessageObject = OBJECT) -> list[Event]:
    stream = MessageStream(message, "req-1")
    return checked_events(b"".join(stream.push(each) for each in messages) + stream.finish())


def checked_events(written: bytes) -> list[Event]:
    """All events but pings, each valid for the client."""
    found = [event for event in events(written) if event.name != "ping"]
    for event in found:
        assert event.data["type"] == event.name
        assert set(EVENT.validate_python(event.data).model_extra or ()) <= {"context_management"}  # of a beta
    return found


def whole(messages: list[pb.GenerateResponse], message: MessageObject = OBJECT) -> Message:
    answer = OutputParts()
    for each in messages:
        answer.push(each)
    return Message.model_validate_json(message.ended(answer))


def names(found: list[Event]) -> list[str]:
    return [event.name for event in found]


def deltas(found: list[Event]) -> list[dict[str, Any]]:
    return [event.data["delta"] for event in found if event.name == "content_block_delta"]


def test_text_streams_as_one_block() -> None:
    found = streamed(TEXT)
    assert names(found) == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert deltas(found) == [{"type": "text_delta", "text": piece} for piece in ("Hel", "lo\n\u2028", "!")]
    assert found[0].data["message"]["content"] == []
    assert found[-2].data["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2].data["usage"] == {
        "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16, "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 0},
    }  # fmt: skip


def test_thinking_comes_first_and_is_signed() -> None:
    found = streamed(REASONED)
    kinds = [delta["type"] for delta in deltas(found)]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    answer = whole(REASONED)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].model_dump()["signature"] == deltas(found)[2]["signature"] != ""
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == 3


def test_thinking_can_be_left_out() -> None:
    message = replace(OBJECT, omits_thinking=True)
    assert [delta["type"] for delta in deltas(streamed(REASONED, message))] == ["signature_delta", "text_delta"]
    block = whole(REASONED, message).content[0]
    assert block.type == "thinking"
    assert (block.thinking, bool(block.signature)) == ("", True)


def test_reasoning_between_tools_has_blocks_of_its_own() -> None:
    interleaved = [
        chat_message(reasoning="First."),
        called(0, id="call_a", name="weather", arguments="{}"),
        chat_message(reasoning="Then."),
        called(1, id="call_b", name="time", arguments="{}"),
        ended(),
    ]
    kinds = ["thinking", "tool_use", "thinking", "tool_use"]
    found = streamed(interleaved)
    assert [each.data["content_block"]["type"] for each in found if each.name == "content_block_start"] == kinds
    signatures = [delta["signature"] for delta in deltas(found) if delta["type"] == "signature_delta"]
    assert [block.type for block in whole(interleaved).content] == kinds
    assert [block.signature for block in whole(interleaved).content if block.type == "thinking"] == signatures


def test_the_first_event_has_the_prompts_tokens_as_far_as_they_are_known() -> None:
    first = chat_message("Hel")
    first.prompt_usage.prompt_tokens, first.prompt_usage.cached_tokens = 20, 16
    usage = streamed([first, ended()])[0].data["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 16, 0)


def test_edits_that_were_asked_for_are_listed_at_the_end() -> None:
    message = replace(OBJECT, names_edits=True)
    assert streamed(TEXT, message)[-2].data["context_management"] == {"applied_edits": []}
    assert "context_management" not in streamed(TEXT)[-2].data


def test_tool_calls_stream_their_input_as_json() -> None:
    found = streamed(TOOLS)
    blocks = [event.data["content_block"] for event in found if event.name == "content_block_start"]
    assert blocks[1:] == [
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]
    assert [delta["partial_json"] for delta in deltas(found)[1:]] == ['{"city":', '"Rome"}']
    assert found[-2].data["delta"]["stop_reason"] == "tool_use"
    answer = whole(TOOLS)
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("call_a", "weather", {"city": "Rome"}),
        ("call_b", "time", {}),
    ]


@pytest.mark.parametrize("messages", [TEXT, REASONED, TOOLS, [ended()], [*TEXT[:2], ended(length=True)]])
def test_blocks_start_and_stop_in_order_and_agree_with_the_whole_message(messages: list[pb.GenerateResponse]) -> None:
    found, answer = streamed(messages), whole(messages)
    started = [event.data["index"] for event in found if event.name == "content_block_start"]
    assert started == [event.data["index"] for event in found if event.name == "content_block_stop"]
    assert started == list(range(len(answer.content)))
    text = "".join(delta.get("text", "") for delta in deltas(found))
    assert text == "".join(block.text for block in answer.content if block.type == "text")
    end = found[-2].data
    assert (end["delta"]["stop_reason"], end["usage"]["output_tokens"]) == (
        answer.stop_reason,
        answer.usage.output_tokens,
    )


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (ended(), "end_turn", None),
        (ended(stop="128001"), "end_turn", None),
        (ended(stop="END"), "stop_sequence", "END"),
        (ended(length=True), "max_tokens", None),
    ],
)
def test_the_stop_reason_says_why_an_output_ended(last: pb.GenerateResponse, reason: str, sequence: str | None) -> None:
    answer = whole([chat_message("x"), last])
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_a_full_context_is_no_reached_limit() -> None:
    message = replace(OBJECT, max_tokens=100)
    assert whole([ended(length=True)], message).stop_reason == "model_context_window_exceeded"


def test_a_call_that_was_cut_off_does_not_count_as_made() -> None:
    messages = [called(0, id="c", name="f", arguments='{"city": "Ro'), ended(length=True)]
    answer = whole(messages)
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].model_dump()["input"] == {}
    assert streamed(messages)[-2].data["delta"]["stop_reason"] == "max_tokens"


def test_the_request_decides_what_is_written() -> None:
    request = checked(
        MessagesRequest,
        {
            "max_tokens": 2000, "messages": [{"role": "user", "content": "x"}], "stop_sequences": ["a"],
            "thinking": {"type": "adaptive", "display": "omitted"},
        },
    )  # fmt: skip
    made = MessageObject.of(request, id="msg_1", model="m")
    assert made == MessageObject("msg_1", "m", 2000, ("a",), omits_thinking=True)


def test_the_receipt_is_there_if_wanted() -> None:
    message = replace(OBJECT, write_receipt=lambda receipt: {"why": receipt.why})
    assert whole(TEXT, message).model_extra == {"baton": {"receipt": {"why": "test"}}}
    stream = MessageStream(message, "req-1")
    assert b'"baton":{"receipt":{"why":"test"}}' in stream.push(ended()) + stream.finish()


def test_an_error_is_the_last_event() -> None:
    stream = MessageStream(OBJECT, "req-1")
    written = stream.push(chat_message("Hel")) + stream.error(Overloaded("no room", cure="try later"))
    assert events(written)[-1] == Event(
        "error",
        {
            "type": "error",
            "error": {"type": "rate_limit_error", "message": "no room; try later"},
            "request_id": "req-1",
        },
    )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("bad"), "invalid_request_error"),
        (UnknownModel("none"), "not_found_error"),
        (HttpRefusal(413, "body_too_large", "big"), "request_too_large"),
        (HttpRefusal(405, "method_not_allowed", "no"), "invalid_request_error"),
        (Overloaded("full"), "rate_limit_error"),
        (NoNode("none"), "overloaded_error"),
        (Draining("bye"), "overloaded_error"),
        (DeadlineExceeded("late"), "timeout_error"),
        (InternalError("bug"), "api_error"),
    ],
)
def test_errors_have_anthropics_types(error: BatonError, kind: str) -> None:
    body = anthropic_error(error, "req-1")
    assert body == {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": "req-1"}


@pytest.mark.parametrize("messages", [TEXT, REASONED, TOOLS])
def test_a_stream_goes_on_after_what_the_client_has(messages: list[pb.GenerateResponse]) -> None:
    """As if the client had never lost the gateway that sent the first events."""
    found = streamed(messages)
    for place in range(1, len(messages)):
        stream = MessageStream(OBJECT, "req-1")
        for message in messages[:place]:
            stream.skip(message)
        rest = events(b"".join(stream.push(message) for message in messages[place:]) + stream.finish())
        assert rest == found[-len(rest) :]
        assert 0 < len(rest) < len(found)


@pytest.mark.parametrize("omits", [False, True])
def test_deltas_have_the_tokens_whose_text_is_complete_with_them(omits: bool) -> None:
    stream = MessageStream(replace(OBJECT, omits_thinking=omits), "req-1", token_ids=True)
    messages = [
        chat_message(reasoning="So", tokens=(3,)),
        chat_message("", tokens=(4,)),
        chat_message("Yes", tokens=(5, 6)),
        ended(content="!"),
    ]
    found = events(b"".join(map(stream.push, messages)) + stream.finish())
    ids = [each.data.get("token_ids") for each in found if each.name == "content_block_delta"]
    assert [each for each in ids if each] == ([[3, 4, 5, 6]] if omits else [[3], [4, 5, 6]])
