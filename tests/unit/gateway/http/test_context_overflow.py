"""A prompt that is too long is refused in the words that client libraries recognize, through every endpoint."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.http_gateway import HttpGateway, open_http_gateway


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_endpoints_have_openais_code_and_words(door: HttpGateway, stream: bool) -> None:
    most = door.context.fleet.max_context_tokens
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": [1] * most}, "prompt"),
        ("/v1/completions", {"prompt": "word " * most}, "prompt"),
        ("/v1/completions", {"prompt": "word " * 50 * most}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * most}]}, "messages"),
    ]
    if not stream:
        bodies.append(("/v1/responses", {"input": "word " * most}, "input"))
    for path, body, param in bodies:
        answer = await door.call("POST", path, {**body, "stream": stream})
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", param)
        assert answer.error["message"].lower().startswith(f"this model's maximum context length is {most} tokens. ")
    assert door.decode.received.empty()


@pytest.mark.parametrize("words", [1, 50])
async def test_a_stream_of_responses_ends_with_the_event_by_which_codex_shortens_its_conversation(
    door: HttpGateway, words: int
) -> None:
    """It looks for the code in `response.failed` only; a status 400 ends its turn."""
    most = door.context.fleet.max_context_tokens
    wire = await door.connect()
    wire.send("POST", "/v1/responses", json.dumps({"input": "word " * words * most, "stream": True}).encode())
    assert (await wire.head()).status == 200
    found = events(await wire.chunks())
    assert [event.name for event in found] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    assert [event.data["sequence_number"] for event in found] == [0, 1, 2, 3]
    error, failed = found[2].data, found[3].data["response"]
    assert error["error"]["code"] == error["code"] == failed["error"]["code"] == "context_length_exceeded"
    assert (error["param"], failed["status"]) == ("input", "failed")
    assert failed["error"]["message"].lower().startswith(f"this model's maximum context length is {most} tokens. ")
    assert (await door.call("GET", f"/v1/responses/{failed['id']}")).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_endpoint_has_anthropics_words(door: HttpGateway, stream: bool) -> None:
    most = door.context.fleet.max_context_tokens
    for words in (most, 50 * most):
        body = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 5, "stream": stream}
        answer = await door.call("POST", "/v1/messages", body)
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        message = answer.json["error"]["message"]
        assert message.startswith("prompt is too long: ")
        assert f" tokens > {most - 1} maximum" in message
        assert int(message.split()[4]) >= most


async def test_tokens_are_counted_also_where_they_are_too_many_so_that_clients_know_how_much_to_cut(
    door: HttpGateway,
) -> None:
    most = door.context.fleet.max_context_tokens
    body = {"messages": [{"role": "user", "content": "9x " * most}]}
    refused = await door.call("POST", "/v1/messages", {**body, "max_tokens": 5})
    counted = await door.call("POST", "/v1/messages/count_tokens", body)
    assert refused.status == 400
    assert counted.json["input_tokens"] == int(refused.json["error"]["message"].split()[4]) >= most


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_an_empty_conversation_is_refused_and_not_counted(door: HttpGateway, content: object) -> None:
    for messages in ([], [{"role": "user", "content": content}]):
        for path, more in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
            answer = await door.call("POST", path, {"messages": messages, **more})
            assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error"), path
