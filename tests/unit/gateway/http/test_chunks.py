"""A stream's messages become OpenAI's chunks."""

import json
from typing import Any

from baton.core.errors import NoNode
from baton.gateway.http.chunks import ChatChunks, CompletionChunks, StreamShape
from baton.gateway.http.logprobs import LogprobWriter
from baton.protos.v1 import generation_pb2 as pb
from tests.unit.gateway.http.tokens import LENGTH, Numbers, chat, last, text, token

WRITER = LogprobWriter(Numbers(), as_ids=False)


def shape(**fields: Any) -> StreamShape:
    return StreamShape("chunk", "id-1", 100, "m", "r", **fields)


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    parts = data.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts if part != "data: [DONE]"]


def choice(data: bytes) -> dict[str, Any]:
    (event,) = events(data)
    (only,) = event["choices"]
    assert isinstance(only, dict)
    return only


def test_a_chats_first_chunk_has_the_role_and_every_chunk_the_same_frame() -> None:
    stream = ChatChunks(shape())
    first, second = events(stream.push(chat("a")) + stream.push(chat('"b"\n')))
    assert first == {
        "id": "id-1", "object": "chunk", "created": 100, "model": "m",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}],
    }  # fmt: skip
    assert second["choices"][0]["delta"] == {"content": '"b"\n'}


def test_a_message_without_text_is_no_chunk() -> None:
    stream = ChatChunks(shape())
    stream.push(chat("a"))
    assert stream.push(chat("")) == b""


def test_the_last_chunk_says_why_the_output_ended_and_the_stream_is_done() -> None:
    stream = ChatChunks(shape())
    stream.push(chat("a"))
    ended = choice(stream.push(last(stop_reason="42")))
    assert (ended["finish_reason"], ended["stop_reason"], ended["delta"]) == ("stop", 42, {})
    assert stream.finish() == b"data: [DONE]\n\n"


def test_usage_is_a_chunk_of_its_own_and_null_before() -> None:
    stream = ChatChunks(shape(include_usage=True))
    data = [stream.push(chat("a")), stream.push(chat("b")), stream.push(last(LENGTH)), stream.finish()]
    *before, usage = events(b"".join(data))
    assert all(event["usage"] is None for event in before)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip


def test_continuous_usage_counts_the_tokens_of_every_chunk() -> None:
    stream = ChatChunks(shape(continuous_usage=True))
    data = [stream.push(chat("a", token(1))), stream.push(chat("b", token(2), token(3)))]
    assert [event["usage"]["completion_tokens"] for event in events(b"".join(data))] == [1, 3]


def test_reasoning_and_tool_calls_have_deltas_of_their_own() -> None:
    stream = ChatChunks(shape())
    assert choice(stream.push(chat(reasoning="hm")))["delta"]["reasoning_content"] == "hm"
    begins = pb.ToolCallDelta(index=0, id="call-1", name="f", arguments="{")
    goes_on = pb.ToolCallDelta(index=0, arguments="}")
    assert choice(stream.push(chat(tool_calls=[begins])))["delta"]["tool_calls"] == [
        {"index": 0, "id": "call-1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    ]
    assert choice(stream.push(chat(tool_calls=[goes_on])))["delta"]["tool_calls"] == [
        {"index": 0, "function": {"arguments": "}"}}
    ]
    assert choice(stream.push(last()))["finish_reason"] == "tool_calls"


def test_a_tool_call_that_was_cut_off_ends_for_its_length() -> None:
    stream = ChatChunks(shape())
    stream.push(chat(tool_calls=[pb.ToolCallDelta(index=0, id="c", name="f")]))
    assert choice(stream.push(last(LENGTH)))["finish_reason"] == "length"


def test_reasoning_can_be_left_out() -> None:
    stream = ChatChunks(shape(reasoning=False))
    stream.push(chat("a"))
    assert stream.push(chat(reasoning="hm")) == b""


def test_a_chats_logprobs_have_text_and_bytes() -> None:
    stream = ChatChunks(shape(logprobs=WRITER))
    logprobs = choice(stream.push(chat(" 5", token(5, -0.5, t6=-1.0))))["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": " 5",
                "logprob": -0.5,
                "bytes": [32, 53],
                "top_logprobs": [{"token": " 6", "logprob": -1.0, "bytes": [32, 54]}],
            }
        ],
        "refusal": None,
    }


def test_logprobs_of_held_back_text_are_not_lost() -> None:
    stream = ChatChunks(shape(logprobs=WRITER))
    stream.push(chat("a"))
    assert choice(stream.push(chat("", token(5, -0.5))))["logprobs"]["content"][0]["token"] == " 5"


def test_outputs_differ_by_their_index() -> None:
    stream = ChatChunks(shape())
    data = [stream.push(chat("a", index=1)), stream.push(chat("b", index=0)), stream.push(chat("c", index=1))]
    assert [event["choices"][0]["index"] for event in events(b"".join(data))] == [1, 0, 1]
    roles = ["role" in event["choices"][0]["delta"] for event in events(b"".join(data))]
    assert roles == [True, True, False]


def test_the_receipt_comes_with_the_last_chunk() -> None:
    stream = ChatChunks(shape(receipt=True))
    (first,) = events(stream.push(chat("a")))
    (ended,) = events(stream.push(last()))
    assert "baton" not in first
    assert ended["baton"]["receipt"]["path"] == "local"


def test_completions_of_several_prompts_count_their_choices_on() -> None:
    stream = CompletionChunks(shape(outputs=2))
    data = stream.for_prompt(0)(text("a", index=1)) + stream.for_prompt(1)(text("b", index=0))
    assert [(event["choices"][0]["index"], event["choices"][0]["text"]) for event in events(data)] == [
        (1, "a"),
        (2, "b"),
    ]


def test_usage_adds_up_over_prompts() -> None:
    stream = CompletionChunks(shape(include_usage=True))
    stream.for_prompt(0)(last())
    stream.for_prompt(1)(last())
    *_, usage = events(stream.finish())
    assert usage["usage"]["total_tokens"] == 20


def test_echo_begins_with_the_prompt_and_its_logprobs() -> None:
    stream = CompletionChunks(shape(logprobs=WRITER), echoes=("ab",))
    message = text(" 5", token(5, -0.5))
    message.prompt_logprobs.add(token_id=1)
    message.prompt_logprobs.add(token_id=2, logprob=-3)
    first = choice(stream.push(message))
    assert first["text"] == "ab 5"
    assert first["logprobs"] == {
        "tokens": [" 1", " 2", " 5"],
        "token_logprobs": [None, -3.0, -0.5],
        "top_logprobs": [None, {" 2": -3.0}, {" 5": -0.5}],
        "text_offset": [0, 2, 4],
    }
    assert choice(stream.push(text(" 6", token(6, -1))))["logprobs"]["text_offset"] == [6]


def test_echo_alone_hides_the_token_that_nobody_asked_for() -> None:
    stream = CompletionChunks(shape(), echoes=("ab",), hides_tokens=True)
    assert choice(stream.push(text("x", token(5))))["text"] == "ab"
    assert choice(stream.push(last(LENGTH)))["text"] == ""


def test_an_impossible_tokens_logprob_is_a_number_that_json_has() -> None:
    stream = CompletionChunks(shape(logprobs=WRITER))
    assert choice(stream.push(text("x", token(5, float("-inf")))))["logprobs"]["token_logprobs"] == [-9999.0]


def test_tokens_can_be_named_by_their_ids() -> None:
    stream = CompletionChunks(shape(logprobs=LogprobWriter(Numbers(), as_ids=True), token_ids=True))
    first = choice(stream.push(text("x", token(5, -1))))
    assert (first["logprobs"]["tokens"], first["token_ids"]) == (["token_id:5"], [5])


def test_a_stream_that_cannot_go_on_ends_with_an_error() -> None:
    (event,) = events(CompletionChunks(shape()).error(NoNode("no node")))
    assert event["error"] == {
        "message": "no node", "type": "service_unavailable_error", "param": None, "code": "no_node", "request_id": "r",
    }  # fmt: skip
