"""A client that lost its gateway in a stream asks another one for the rest, with the tokens that it has."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.protos.internal.v1 import decode_pb2
from tests.unit.gateway.http.http_gateway import HttpGateway, Wire, open_http_gateway, step_token

PROMPT = list(range(1, 65))
BODY = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "stream": True, "return_token_ids": True}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


def parts_of(data: bytes) -> list[dict[str, Any]]:
    events = [line.removeprefix(b"data: ") for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(event) for event in events if event != b"[DONE]"]


def tokens_of(parts: list[dict[str, Any]]) -> list[int]:
    return [each for part in parts for choice in part["choices"] for each in choice.get("token_ids", [])]


def text_of(parts: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for part in parts for choice in part["choices"])


async def ask(door: HttpGateway, path: str = "/v1/completions", body: dict[str, Any] = BODY, **fields: object) -> Wire:
    wire = await door.connect()
    wire.send("POST", path, json.dumps({**body, **fields}).encode(), x_request_id="r-1")
    return wire


async def serve(door: HttpGateway, wire: Wire, *, given: list[int]) -> list[dict[str, Any]]:
    """The decode node sends the tokens after those, each when the client has the one before. Returns all chunks."""
    submitted = await door.decode.submission()
    assert list(submitted.output_token_ids) == given
    accepted = decode_pb2.Accepted(key=submitted.key, why="short")
    door.decode.answers.put_nowait(decode_pb2.SessionResponse(accepted=accepted))
    parts: list[dict[str, Any]] = []
    for index in range(len(given), 2):
        door.decode.send_tokens(step_token(index), key=submitted.key)
        if not parts:
            assert (await wire.head()).status == 200
        parts += parts_of(await wire.chunk())
    door.finish(2, key=submitted.key)
    if not parts:
        assert (await wire.head()).status == 200
    return parts + parts_of(await wire.chunks())


@pytest.mark.parametrize("count", [1, 2])
async def test_the_rest_follows_the_tokens_that_the_client_has(door: HttpGateway, count: int) -> None:
    whole = await serve(door, await ask(door), given=[])
    token_ids = tokens_of(whole)
    assert token_ids == [300, 301, 302]
    given = token_ids[:count]
    rest = await serve(door, await ask(door, baton={"output_token_ids": given}, **USAGE), given=given)
    assert tokens_of(rest) == token_ids[count:]
    assert text_of(whole[:count]) + text_of(rest) == text_of(whole)
    assert {part["id"] for part in rest} == {part["id"] for part in whole}
    assert rest[0]["usage"]["completion_tokens"] == count + 1
    assert (rest[-1]["usage"]["prompt_tokens"], rest[-1]["usage"]["completion_tokens"]) == (64, 3)


async def test_a_client_that_lacks_only_the_end_gets_it_and_no_node_is_asked(door: HttpGateway) -> None:
    wire = await ask(door, baton={"output_token_ids": [300, 301, 302]})
    assert (await wire.head()).status == 200
    (end,) = parts_of(await wire.chunks())
    assert end["choices"][0]["finish_reason"] == "length"
    assert (tokens_of([end]), text_of([end])) == ([], "")
    assert door.decode.received.empty()


SAID = [{"role": "user", "content": "hello"}]
CHATS = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
}
OF_ALL = {"temperature": 0, "return_token_ids": True}


def piece_of(part: dict[str, Any]) -> tuple[str, list[int]]:
    """The text and the tokens that an event of any API adds."""
    for choice in part.get("choices", ()):
        return choice["delta"].get("content", ""), choice.get("token_ids", [])
    delta = part.get("delta", "")
    text = delta if isinstance(delta, str) else delta.get("text", "")
    return text, part.get("token_ids", [])


@pytest.mark.parametrize("path", CHATS)
async def test_streams_of_chats_go_on_with_their_next_events(door: HttpGateway, path: str) -> None:
    body = {**CHATS[path], **OF_ALL}
    whole = await serve(door, await ask(door, path, body, stream=True), given=[])
    pieces = [piece_of(part) for part in whole]
    assert [each for _, ids in pieces for each in ids] == [300, 301, 302]
    for count in (1, 2):
        rest = await serve(
            door,
            await ask(door, path, body, stream=True, baton={"output_token_ids": [300, 301][:count]}),
            given=[300, 301][:count],
        )
        place = next(at for at in range(len(whole)) if sum(len(ids) for _, ids in pieces[: at + 1]) == count) + 1
        assert list(map(piece_of, rest)) == pieces[place:]
        kinds = [[part.get("type") for part in parts] for parts in (rest, whole[place:])]
        assert kinds[0] == kinds[1]
        assert whole_of(rest[-1]) == whole_of(whole[-1])


def whole_of(part: dict[str, Any]) -> object:
    """What the last event says of the whole answer."""
    response = part.get("response", {})
    return response.get("output"), response.get("usage"), part.get("usage"), part.get("choices")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_an_answer_in_one_piece_has_what_the_client_gave(door: HttpGateway, path: str) -> None:
    """Both send the arguments as an object, and a part of an object is not an object."""
    whole = await finished(door, await ask(door, path, {**CHATS[path], **OF_ALL}), given=[])
    again = await finished(
        door, await ask(door, path, {**CHATS[path], **OF_ALL}, baton={"output_token_ids": [300, 301]}), given=[300, 301]
    )
    for answer in (whole, again):
        answer.pop("created_at", None)
    assert again == whole


async def finished(door: HttpGateway, wire: Wire, *, given: list[int]) -> dict[str, Any]:
    submitted = await door.decode.submission()
    assert list(submitted.output_token_ids) == given
    accepted = decode_pb2.Accepted(key=submitted.key, why="short")
    door.decode.answers.put_nowait(decode_pb2.SessionResponse(accepted=accepted))
    for index in range(len(given), 2):
        door.decode.send_tokens(step_token(index), key=submitted.key)
    door.finish(2, key=submitted.key)
    answer: dict[str, Any] = (await wire.answer()).json
    return answer


async def test_logprobs_of_a_response_are_those_of_one_gateway(door: HttpGateway) -> None:
    body = {**CHATS["/v1/responses"], "temperature": 0, "top_logprobs": 2, "baton": {"output_token_ids": [300]}}
    answer = await door.call("POST", "/v1/responses", body)
    assert (answer.status, answer.error["param"]) == (400, "baton.output_token_ids")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"baton": {"output_token_ids": [1, 2, 3, 4]}}, "baton.output_token_ids"),
        ({"baton": {"output_token_ids": [1]}, "temperature": 1.0}, "baton.output_token_ids"),
        ({"baton": {"output_token_ids": [1]}, "n": 2}, "baton.output_token_ids"),
        ({"baton": {"output_token_ids": [-1]}}, "baton.output_token_ids[0]"),
        ({"baton": {"output_token_ids": [1]}, "prompt": ["a", "b"]}, "baton.output_token_ids"),
        ({"baton": {"output_token_ids": [1]}, "echo": True}, "baton.output_token_ids"),
    ],
)
async def test_tokens_after_which_nothing_can_go_on_are_refused(
    door: HttpGateway, fields: dict[str, object], param: str
) -> None:
    answer = await door.call("POST", "/v1/completions", {**BODY, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_chunks_have_the_revision_that_a_resumed_request_names(door: HttpGateway) -> None:
    whole = await serve(door, await ask(door), given=[])
    prints = {part["system_fingerprint"] for part in whole}
    (revision,) = prints
    assert len(revision) == 12
    rest = await serve(door, await ask(door, baton={"output_token_ids": [300], "revision": revision}), given=[300])
    assert {part["system_fingerprint"] for part in rest} == prints
    for unknown, status in (("0123456789ab", 503), ("main", 400)):
        wire = await ask(door, baton={"output_token_ids": [300], "revision": unknown})
        assert (await wire.answer()).status == status


async def test_the_served_model_names_its_revisions(door: HttpGateway) -> None:
    answer = await door.call("GET", "/v1/models")
    assert answer.status == 200
    (card,) = answer.json["data"]
    (shown,) = card["revisions"]
    assert shown["revision"] == card["revision"]


async def test_a_bundled_model_says_that_it_is_a_demo(door: HttpGateway) -> None:
    (card,) = (await door.call("GET", "/v1/models")).json["data"]
    assert card["description"].startswith("demo model, trained on docstrings")
