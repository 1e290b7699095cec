"""Responses and Messages on real connections, in front of scripted nodes: errors in their own shape, streams that fail,
clients that leave."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest

from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.http_gateway import HttpGateway, Wire, open_http_gateway, step_token

TURN = {"role": "user", "content": "Return the name of the"}
RESPONSE: dict[str, Any] = {"input": [TURN], "max_output_tokens": 10}
MESSAGE: dict[str, Any] = {"messages": [TURN], "max_tokens": 10}
BODIES = {"/v1/responses": RESPONSE, "/v1/messages": MESSAGE}

NO_JSON = [b"", b"{", b'{"input": "\xff"}', b'{"max_tokens": NaN}', b"[]", b'"x"', b"[" * 100_000, b'{"a":1,"a":2}']


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


async def begin(door: HttpGateway, path: str, *, stream: bool = True, **headers: str) -> Wire:
    """A request that has reached the decode node."""
    wire = await door.connect()
    wire.send("POST", path, json.dumps({**BODIES[path], "stream": stream}).encode(), **headers)
    await door.accept()
    return wire


@pytest.mark.parametrize("body", NO_JSON)
async def test_what_is_no_json_object_is_refused_in_each_apis_shape(door: HttpGateway, body: bytes) -> None:
    answer = await door.call("POST", "/v1/responses", body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = await door.call("POST", path, body)
        assert (answer.status, answer.json["type"]) == (400, "error")
        assert answer.json["error"]["type"] == "invalid_request_error"
        assert answer.json["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert door.decode.received.empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_wrong_reaches_no_node(door: HttpGateway, stream: bool) -> None:
    wrong: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "other"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"min_tokens": 11}, 400, "min_tokens"),
        ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
        ({"stop_token_ids": [99999999]}, 400, "stop_token_ids"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ]
    for change, status, field in wrong:
        answer = await door.call("POST", "/v1/responses", {**RESPONSE, **change, "stream": stream})
        assert answer.status == status
        assert answer.error["param"].startswith(field), change
        answer = await door.call("POST", "/v1/messages", {**MESSAGE, **change, "stream": stream})
        assert answer.status == status
        assert field in answer.json["error"]["message"], change
    assert door.decode.received.empty()


async def test_a_body_that_is_too_large_has_anthropics_type() -> None:
    async with open_http_gateway(http_body_mib=0.001) as small:
        answer = await small.call("POST", "/v1/messages", b" " * 5000)
    assert (answer.status, answer.json["error"]["type"]) == (413, "request_too_large")


async def test_a_full_gateway_says_so_in_anthropics_shape() -> None:
    async with open_http_gateway("--max-concurrent-requests", "1") as full:
        await begin(full, "/v1/messages")
        answer = await full.call("POST", "/v1/messages", MESSAGE)
    assert (answer.status, answer.json["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", list(BODIES))
async def test_tokens_are_events_when_they_come(door: HttpGateway, path: str) -> None:
    wire = await begin(door, path, x_request_id="r1")
    door.decode.send_tokens(step_token(0))
    head = await wire.head()
    assert head.headers["content-type"].startswith("text/event-stream")
    assert head.headers["x-request-id"] == "r1"
    first = events(await wire.chunk())
    assert first[0].name in ("response.created", "message_start")
    door.finish(1)
    assert events(await wire.chunks())[-1].name in ("response.incomplete", "message_stop")


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(door: HttpGateway, path: str, stream: bool) -> None:
    wire = await begin(door, path, stream=stream)
    wire.writer.close()
    await door.cancelled()


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_stream_that_fails_midway_ends_with_its_apis_event(door: HttpGateway, path: str) -> None:
    wire = await begin(door, path, x_request_id="r1")
    door.decode.send_tokens(step_token(0))
    await wire.head()
    await wire.chunk()
    assert await door.serving.abort(["r1"]) == ["r1"]
    last = events(await wire.chunks())[-1]
    if path == "/v1/responses":
        assert last.name == "response.failed"
        assert last.data["response"]["error"]["code"] == "server_error"
        assert last.data["response"]["output"][0]["status"] == "incomplete"
    else:
        assert (last.name, last.data["error"]["type"], last.data["request_id"]) == ("error", "api_error", "r1")


@pytest.mark.parametrize("path", list(BODIES))
async def test_the_receipt_comes_on_request(door: HttpGateway, path: str) -> None:
    wire = await begin(door, path, stream=False, x_baton_receipt="1")
    door.finish(0)
    assert (await wire.answer()).json["baton"]["receipt"]["decode_node"]


async def test_every_reference_of_the_page_leads_somewhere(door: HttpGateway) -> None:
    page = (await door.call("GET", "/openapi.json")).json
    known = page["components"]["schemas"]

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [found for inner in value.values() for found in references(inner)]
        return [found for inner in value for found in references(inner)] if isinstance(value, list) else []

    found = {reference.removeprefix("#/components/schemas/") for reference in references(page)}
    assert {"ResponsesRequest", "MessagesRequest", "CountTokensRequest"} <= found <= set(known)
    assert "input" in known["ResponsesRequest"]["required"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_of_no_tokens_computes_the_prompt_and_has_no_text(door: HttpGateway, stream: bool) -> None:
    """So clients fill prefix caches before they need them."""
    wire = await door.connect()
    body = {**MESSAGE, "max_tokens": 0, "stream": stream, "baton": {"receipt": True}}
    wire.send("POST", "/v1/messages", json.dumps(body).encode())
    key = await door.accept()
    door.decode.send_tokens(step_token(0), key=key)
    door.finish(1, key=key)
    if stream:
        await wire.head()
        found = events(await wire.chunks())
        assert [event.name for event in found] == ["message_start", "ping", "message_delta", "message_stop"]
        answer = found[0].data["message"] | found[2].data["delta"] | found[2].data
    else:
        answer = (await wire.answer()).json
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    assert answer["usage"]["input_tokens"] > 0
    assert answer["usage"]["output_tokens"] == 0
    assert answer["baton"]["receipt"]["request_id"]


async def test_a_tool_runner_is_told_to_send_the_whole_conversation(door: HttpGateway) -> None:
    """Anthropic's libraries go on without a thread only if the error has this code."""
    for stream in (False, True):
        thread = {"thread": {"type": "create"}, "stream": stream}
        answer = await door.call("POST", "/v1/messages", {**MESSAGE, **thread})
        assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error")
        assert answer.json["error"]["details"] == {"error_code": "thread_unsupported_request"}
    other = await door.call("POST", "/v1/messages", {**MESSAGE, "compaction": {}})
    assert "details" not in other.json["error"]


async def test_a_picture_in_a_message_is_refused_with_the_cure(door: HttpGateway) -> None:
    picture = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AA=="}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, picture]}
    answer = await door.call("POST", "/v1/responses", {**RESPONSE, "input": [turn]})
    assert (answer.status, answer.error["param"]) == (400, "input[0].content[1].type")
    assert "the model reads text only" in answer.error["message"]
    turn["content"] = [{"type": "hologram"}]
    answer = await door.call("POST", "/v1/responses", {**RESPONSE, "input": [turn]})
    assert answer.error["message"].endswith("allowed: 'input_text', 'output_text', 'refusal'")


async def test_the_list_of_models_has_the_fields_of_both_apis(door: HttpGateway) -> None:
    listed = (await door.call("GET", "/v1/models")).json
    assert (listed["object"], listed["has_more"]) == ("list", False)
    (card,) = listed["data"]
    assert listed["first_id"] == listed["last_id"] == card["id"] == card["display_name"]
    assert (card["object"], card["type"]) == ("model", "model")
    assert card["max_input_tokens"] == card["max_model_len"]
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]


async def test_a_schema_that_cannot_be_forced_is_named_as_part_of_the_tools(door: HttpGateway) -> None:
    function = {"name": "find", "parameters": {"type": "object", "properties": {"a": {"$ref": "https://a.example/b"}}}}
    forced = {"tool_choice": "required"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [TURN], "tools": [{"type": "function", "function": function}], **forced},
        "/v1/responses": {**RESPONSE, "tools": [{"type": "function", **function}], **forced},
    }
    for path, body in bodies.items():
        answer = await door.call("POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, "tools"), path
        assert "$ref" in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "change", "cure"),
    [
        ("/v1/responses", {"messages": [TURN]}, "messages is not a parameter of this endpoint; did you mean input?"),
        ("/v1/responses", {"max_tokens": 5}, "did you mean max_output_tokens?"),
        ("/v1/responses", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "did you mean parameters?"),
        ("/v1/messages", {"tools": [{"name": "f", "parameters": {}}]}, "did you mean input_schema?"),
        ("/v1/messages", {"stop": ["a"]}, "did you mean stop_sequences?"),
        ("/v1/messages", {"teleport": 1}, "leave it out; /docs lists all fields"),
    ],
)
async def test_a_field_of_another_api_is_refused_with_the_name_that_it_has_here(
    door: HttpGateway, path: str, change: dict[str, Any], cure: str
) -> None:
    answer = await door.call("POST", path, {**BODIES[path], **change})
    assert answer.status == 400
    assert answer.json["error"]["message"].endswith(cure)
