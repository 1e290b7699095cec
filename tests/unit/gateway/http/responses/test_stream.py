"""Streams and whole answers of the Responses API, read with the types of OpenAI's client."""

import re
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.core.errors import ContextOverflow, InternalError, InvalidRequest, Overloaded
from baton.gateway.http.checking import checked
from baton.gateway.http.responses.answer import Identity, ResponseObject
from baton.gateway.http.responses.models import ResponsesRequest
from baton.gateway.http.responses.stream import ResponsesStream
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.chat_stream import Event, called, chat_message, ended, events

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TEXT = [chat_message("Hel", tokens=(1,)), chat_message("lo\n\u2028"), ended(content="!")]
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
    called(1, id="call_b", name="time", arguments="{}"),
    ended(),
]


def logprobs(tokens: Any) -> list[dict[str, Any]]:
    def entry(token: Any) -> dict[str, Any]:
        return {"token": f"t{token.token_id}", "bytes": [token.token_id], "logprob": token.logprob}

    return [{**entry(token), "top_logprobs": [entry(top) for top in token.top_logprobs]} for token in tokens]


def response(*, wants_logprobs: bool = False, receipt: bool = False, **body: Any) -> ResponseObject:
    request = checked(ResponsesRequest, {"model": "m", "input": "Hello", **body})
    identity = Identity(
        key="77",
        model="llama",
        created_at=1_700_000_000,
        write_logprobs=logprobs if wants_logprobs else None,
        write_receipt=(lambda receipt: {"why": receipt.why}) if receipt else None,
    )
    return ResponseObject(request, identity)


def streamed(messages: list[pb.GenerateResponse], **options: Any) -> list[Event]:
    stream = ResponsesStream(response(**options))
    written = b"".join(stream.push(message) for message in messages) + stream.finish()
    return checked_events(written)


def checked_events(written: bytes) -> list[Event]:
    """All events, each valid for the client, numbered without a gap."""
    found = events(written)
    for event in found:
        assert event.data["type"] == event.name
        read = EVENT.validate_python(event.data)
        assert type(read).__name__.removesuffix("Event").startswith("Response")
        assert set(read.model_extra) <= {"name"}, event  # of a call whose arguments are done; older clients need it
    assert [event.data["sequence_number"] for event in found] == list(range(len(found)))
    return found


def whole(messages: list[pb.GenerateResponse], **options: Any) -> Response:
    written = response(**options)
    answer = written.answer()
    for message in messages:
        answer.push(message)
    return Response.model_validate_json(written.ended(answer))


def names(found: list[Event]) -> list[str]:
    return [event.name.removeprefix("response.") for event in found]


def test_text_streams_as_one_message() -> None:
    found = streamed(TEXT)
    assert names(found) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    deltas = [event.data["delta"] for event in found if event.name == "response.output_text.delta"]
    assert deltas == ["Hel", "lo\n\u2028", "!"]
    assert found[7].data["text"] == "Hello\n\u2028!"


def test_reasoning_comes_before_the_message() -> None:
    found = streamed(REASONED)
    assert names(found)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.data["item"]["type"] for event in found if event.name.endswith("item.done")] == [
        "reasoning",
        "message",
    ]
    assert found[-1].data["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_tool_calls_stream_their_arguments() -> None:
    found = streamed(TOOLS)
    deltas = [(e.data["output_index"], e.data["delta"]) for e in found if e.name.endswith("arguments.delta")]
    assert deltas == [(1, '{"city":'), (1, '"Rome"}'), (2, "{}")]
    done = [(e.data["name"], e.data["arguments"]) for e in found if e.name.endswith("arguments.done")]
    assert done == [("weather", '{"city":"Rome"}'), ("time", "{}")]


@pytest.mark.parametrize("messages", [TEXT, REASONED, TOOLS, [ended()], [*TEXT[:2], ended(length=True)]])
def test_the_last_event_has_what_a_whole_answer_has(messages: list[pb.GenerateResponse]) -> None:
    last = streamed(messages)[-1].data["response"]
    assert Response.model_validate(last) == whole(messages)
    items = [event.data["item"] for event in streamed(messages) if event.name == "response.output_item.done"]
    assert items == last["output"]


def test_a_message_with_everything_keeps_the_order() -> None:
    both = chat_message("So.", reasoning="Hm.", tools=(pb.ToolCallDelta(id="c", name="f", arguments="{}"),))
    assert [item.type for item in whole([both, ended()]).output] == ["reasoning", "message", "function_call"]
    assert names(streamed([both, ended()])).count("output_item.done") == 3


def test_text_after_a_call_is_a_new_message() -> None:
    messages = [*TOOLS[:-1], chat_message("Done."), ended()]
    kinds = [item.type for item in whole(messages).output]
    assert kinds == ["message", "function_call", "function_call", "message"]
    assert len({item.id for item in whole(messages).output}) == 4


def test_the_whole_answer_has_text_usage_and_the_requests_parameters() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    answer = whole(
        TEXT, instructions="Be kind.", temperature=0.5, max_output_tokens=9, metadata={"a": "b"}, tools=[tool],
        tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False, user="u", reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}, truncation="auto",
    )  # fmt: skip
    assert answer.output_text == "Hello\n\u2028!"
    assert answer.id == "resp_77"
    assert answer.status == "completed"
    assert (answer.model, answer.instructions, answer.temperature) == ("llama", "Be kind.", 0.5)
    assert (answer.max_output_tokens, answer.metadata, answer.user) == (9, {"a": "b"}, "u")
    assert answer.tools[0].model_dump(exclude_none=True) == tool
    assert answer.model_dump()["tool_choice"] == {"type": "function", "name": "f"}
    assert answer.model_extra == {"store": False}
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (20, 7, 27)
    assert usage.input_tokens_details.cached_tokens == 16


def test_an_output_that_reached_its_limit_is_incomplete() -> None:
    messages = [chat_message("Hi"), called(0, id="c", name="f", arguments='{"a'), ended(length=True)]
    answer = whole(messages)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.model_dump()["status"] for item in answer.output] == ["completed", "incomplete"]
    assert streamed(messages)[-1].name == "response.incomplete"


def test_an_empty_answer_has_no_items() -> None:
    assert names(streamed([ended()])) == ["created", "in_progress", "completed"]
    assert whole([ended()]).output_text == ""


def test_logprobs_belong_to_the_text_that_their_tokens_made() -> None:
    messages = [
        chat_message(reasoning="Hm", tokens=(1,)),
        chat_message(tokens=(2,)),
        chat_message("So", tokens=(3,)),
        chat_message("!", tokens=(4,)),
        ended(),
    ]
    messages[-1].tokens.add(token_id=5, logprob=-1)
    found = streamed(messages, wants_logprobs=True)
    deltas = [
        [entry["token"] for entry in event.data["logprobs"]]
        for event in found
        if event.name == "response.output_text.delta"
    ]
    assert deltas == [["t2", "t3"], ["t4"]]
    content = found[-1].data["response"]["output"][1]["content"][0]
    assert [entry["token"] for entry in content["logprobs"]] == ["t2", "t3", "t4"]
    assert content["logprobs"][0]["top_logprobs"] == [{"token": "t3", "bytes": [3], "logprob": -1.5}]
    assert all(event.data.get("logprobs", []) == [] for event in streamed(messages))


def test_the_receipt_is_there_if_wanted() -> None:
    assert streamed(TEXT, receipt=True)[-1].data["response"]["baton"] == {"receipt": {"why": "test"}}
    assert "baton" not in streamed(TEXT)[-1].data["response"]


def test_an_error_ends_the_stream_with_the_text_so_far() -> None:
    stream = ResponsesStream(response())
    written = stream.push(chat_message("Hel")) + stream.error(Overloaded("no room", cure="try later"))
    last = checked_events(written)[-1]
    failed = Response.model_validate(last.data["response"])
    assert (last.name, failed.status, failed.output_text) == ("response.failed", "failed", "Hel")
    assert failed.error is not None
    assert failed.error.code == "rate_limit_exceeded"
    assert failed.error.message.startswith("no room; try later. ")


# As in Codex's public source, codex-api's handling of `response.failed`.
CODEX_WAITS = re.compile(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)")


@pytest.mark.parametrize(("wait_s", "said_s"), [(None, 1), (0.01, 1), (4.2, 5), (3600.0, 3600)])
def test_codex_reads_how_long_to_wait_from_the_message_of_an_overload(wait_s: float | None, said_s: float) -> None:
    found = events(ResponsesStream(response()).error(Overloaded("no room", retry_after_s=wait_s)))
    wait = CODEX_WAITS.search(found[-1].data["response"]["error"]["message"])
    assert wait is not None
    assert (float(wait[1]), wait[2]) == (said_s, "s")


def test_the_message_of_another_failure_is_unchanged() -> None:
    found = events(ResponsesStream(response()).error(InternalError("broken", retry_after_s=4.0)))
    assert found[-1].data["response"]["error"] == {"code": "server_error", "message": "broken"}


def test_an_error_before_the_first_message_still_begins_the_stream() -> None:
    found = checked_events(ResponsesStream(response()).error(InternalError("broken")))
    assert names(found) == ["created", "in_progress", "failed"]
    assert found[-1].data["response"]["error"]["code"] == "server_error"


def test_a_context_overflow_has_the_code_that_codex_looks_for() -> None:
    error = ContextOverflow.of(5000, 4096, field="input", cure="shorten it")
    found = events(ResponsesStream(response()).error(error))
    assert names(found) == ["created", "in_progress", "error", "failed"]
    assert found[-1].data["response"]["error"]["code"] == "context_length_exceeded"
    unknown = events(ResponsesStream(response()).error(InvalidRequest("no")))
    assert unknown[-1].data["response"]["error"]["code"] == "invalid_prompt"


def test_pieces_do_not_change_the_answer() -> None:
    text = "The answer, 答え, is 42."
    pieces = [chat_message(char) for char in text]
    assert whole([*pieces, ended()]).output == whole([chat_message(text), ended()]).output


@pytest.mark.parametrize("messages", [TEXT, REASONED, TOOLS])
def test_a_stream_goes_on_after_what_the_client_has(messages: list[pb.GenerateResponse]) -> None:
    """As if the client had never lost the gateway that sent the first events."""
    found = streamed(messages)
    for place in range(1, len(messages)):
        stream = ResponsesStream(response())
        for message in messages[:place]:
            stream.skip(message)
        rest = events(b"".join(stream.push(message) for message in messages[place:]) + stream.finish())
        assert rest == found[-len(rest) :]
        assert 0 < len(rest) < len(found)


def test_deltas_have_the_tokens_whose_text_is_complete_with_them() -> None:
    stream = ResponsesStream(response(), token_ids=True)
    both = [
        chat_message(reasoning="So", tokens=(3,)),
        chat_message("", tokens=(4,)),
        chat_message(reasoning="."),
        chat_message("Yes", tokens=(5, 6)),
    ]
    found = events(b"".join(map(stream.push, [*both, ended(content="!")])) + stream.finish())
    deltas = [(each.data["delta"], each.data.get("token_ids")) for each in found if each.name.endswith(".delta")]
    assert deltas == [("So", [3]), (".", None), ("Yes", [4, 5, 6]), ("!", None)]
