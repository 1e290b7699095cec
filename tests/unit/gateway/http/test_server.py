"""The server on real connections, in front of scripted nodes: limits, errors, streams, clients that leave, drain."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import Response

import baton.gateway.http.event_stream
import baton.gateway.http.protocol
from baton.core.errors import ConfigError
from baton.gateway.http.app import App
from baton.gateway.http.call import HttpCall
from baton.gateway.http.protocol import LimitedProtocol
from baton.gateway.http.server import bind
from tests.unit.gateway.http.http_gateway import BOUND_S, HttpGateway, Wire, open_http_gateway, step_token
from tests.unit.gateway.late import LIMIT_S, let_limit_pass

COMPLETION = {"prompt": [1, 2, 3], "max_tokens": 4}


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


def test_a_taken_port_is_a_wrong_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError) as caught:
            bind(f"127.0.0.1:{taken.getsockname()[1]}")
    assert caught.value.field == "http_listen"


def test_off_is_no_socket() -> None:
    assert bind("off") is None


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "300.0.0.1:1"])
def test_an_address_that_is_none_is_a_wrong_setting(listen: str) -> None:
    with pytest.raises(ConfigError):
        bind(listen)


async def test_what_the_gateway_says_about_itself(door: HttpGateway) -> None:
    models = (await door.call("GET", "/v1/models")).json
    assert [model["id"] for model in models["data"]] == ["llama"]
    assert (await door.call("GET", "/v1/models/llama")).json["id"] == "llama"
    assert (await door.call("GET", "/v1/models/other")).status == 404
    assert (await door.call("GET", "/")).json["gateway"] == "gateway-1"
    assert (await door.call("GET", "/health")).status == 200
    assert (await door.call("GET", "/version")).json["version"]
    running = b'baton_num_requests_running{model_name="llama",role="gateway"} 0.0\n'
    assert running in (await door.call("GET", "/metrics")).body
    assert (await door.call("HEAD", "/health")).status == 200


async def test_the_page_describes_every_body(door: HttpGateway) -> None:
    page = (await door.call("GET", "/openapi.json")).json
    schema = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].removeprefix("#/components/schemas/") in page["components"]["schemas"]
    (parameter,) = page["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("model", "path")
    assert (await door.call("GET", "/docs")).status == 200


async def test_text_becomes_tokens_and_tokens_text(door: HttpGateway) -> None:
    tokens = (await door.call("POST", "/tokenize", {"prompt": "the file"})).json
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert (await door.call("POST", "/detokenize", {"tokens": tokens["tokens"]})).json["prompt"].endswith("the file")
    refused = await door.call("POST", "/detokenize", {"tokens": [1 << 31]})
    assert (refused.status, refused.error["param"]) == (400, "tokens")


async def test_readiness_ends_with_the_drain_and_new_requests_are_refused(door: HttpGateway) -> None:
    assert (await door.call("GET", "/ready")).status == 200
    door.http.drain()
    drain = asyncio.create_task(door.serving.drain(BOUND_S))
    await drain
    assert (await door.call("GET", "/ready")).status == 503
    refused = await door.call("POST", "/v1/completions", COMPLETION)
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "draining", "1")


async def test_answers_during_the_drain_close_their_connections(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("GET", "/health")
    await wire.answer()
    door.http.drain()
    wire.send("GET", "/health")
    assert (await wire.answer()).headers["connection"] == "close"
    assert await wire.closed()


async def test_a_running_stream_finishes_during_the_drain(door: HttpGateway) -> None:
    wire = await door.stream({})
    assert (await wire.head()).status == 200
    await wire.chunk()
    drain = asyncio.create_task(door.serving.drain(BOUND_S))
    door.finish(1)
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(drain, BOUND_S)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("OPTIONS", "/v1/models", 405),
        ("PUT", "/health", 405),
    ],
)
async def test_paths_and_methods_that_do_not_exist(door: HttpGateway, method: str, path: str, status: int) -> None:
    answer = await door.call(method, path)
    assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    assert ("allow" in answer.headers) == (status == 405)


async def test_a_client_that_wants_its_conversation_compacted_reads_what_to_do_without(door: HttpGateway) -> None:
    answer = await door.call("POST", "/v1/responses/compact", {"model": "llama", "input": []})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "ask for a summary by /v1/responses" in answer.error["message"]
    assert "allow" not in answer.headers


WRONG: list[tuple[object, int, str | None]] = [
    (b"{", 400, None),
    (b"", 400, None),
    (b'{"prompt": "\xff"}', 400, None),
    ({}, 400, "prompt"),
    ({**COMPLETION, "model": "other"}, 404, "model"),
    ({**COMPLETION, "temperature": -1}, 400, "temperature"),
    ({**COMPLETION, "top_p": 0}, 400, "top_p"),
    ({**COMPLETION, "logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    ({**COMPLETION, "logit_bias": {"5": 1, "05": 2}}, 400, "logit_bias.05"),
    ({**COMPLETION, "stop_token_ids": [99999999]}, 400, "stop_token_ids"),
    ({**COMPLETION, "colour": "red"}, 400, "colour"),
    ({"prompt": [1 << 31]}, 400, "prompt"),
    ({"prompt": [1 << 31], "echo": True}, 400, "prompt"),
    ({"prompt": [1] * 10000}, 400, "prompt"),
    ({**COMPLETION, "prompt_logprobs": 1000}, 400, "prompt_logprobs"),
    ({**COMPLETION, "guided_json": "{"}, 400, "guided_json"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_wrong_reaches_no_node(door: HttpGateway, stream: bool) -> None:
    for body, status, param in WRONG:
        if isinstance(body, dict) and "prompt_logprobs" not in body:
            body = {**body, "stream": stream}
        answer = await door.call("POST", "/v1/completions", body)
        assert (answer.status, answer.error["param"]) == (status, param), body
    assert door.decode.received.empty()


async def test_a_body_that_is_too_large_is_refused() -> None:
    async with open_http_gateway(http_body_mib=0.001) as door:
        answer = await door.call("POST", "/v1/completions", {"prompt": "a" * 2000})
        assert (answer.status, answer.headers["connection"]) == (413, "close")
        wire = await door.connect()
        wire.send("POST", "/v1/completions", b"800\r\n" + b"a" * 2048 + b"\r\n", transfer_encoding="chunked")
        assert (await wire.answer()).status == 413


async def test_headers_that_are_too_large_are_refused(door: HttpGateway) -> None:
    assert (await door.call("GET", "/health", x="a" * 70000)).status == 431
    wire = await door.connect()
    wire.writer.write(b"GET /health HTTP/1.1\r\nx: " + b"a" * 70000)
    assert (await wire.answer()).status == 431


async def begun(door: HttpGateway, content_length: int) -> Wire:
    """A connection whose server has read a request's head, and waits for its body."""
    wire = await door.connect()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {content_length}"
    wire.writer.write(f"{head}\r\n\r\n".encode())
    assert (await wire.head()).status == 100
    return wire


async def test_a_body_that_stops_coming_is_not_waited_for(door: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = await begun(door, 100)
    monkeypatch.setattr(baton.gateway.http.protocol, "REQUEST_S", 0.01)  # of the time after the next piece
    wire.writer.write(b"{")
    assert (await wire.answer()).error["code"] == "request_timeout"
    assert await wire.closed()


async def test_a_body_that_never_begins_is_not_waited_for(door: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    headers_complete = LimitedProtocol.on_headers_complete

    def on_headers_complete(protocol: LimitedProtocol) -> None:
        monkeypatch.setattr(baton.gateway.http.protocol, "REQUEST_S", 0.01)  # of the time after the headers
        headers_complete(protocol)

    monkeypatch.setattr(LimitedProtocol, "on_headers_complete", on_headers_complete)
    wire = await door.connect()
    wire.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n")
    answer = await wire.answer()
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.error["message"].startswith("no more of the request's body within")


@pytest.mark.parametrize("limit", ["BODY_S", "REQUEST_S"])
async def test_a_body_behind_an_answer_has_its_time_when_it_is_read(
    door: HttpGateway, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Until the answer has ended, the server does not read."""
    wire = await door.connect()
    wire.send("POST", "/v1/completions", json.dumps({**COMPLETION, "stream": True}).encode())
    await door.accept()
    door.decode.send_tokens(step_token(0))
    assert (await wire.head()).status == 200
    passed = asyncio.Event()
    time_out = LimitedProtocol._time_out

    def timed_out(protocol: LimitedProtocol, why: str) -> None:
        monkeypatch.undo()
        time_out(protocol, why)
        passed.set()

    monkeypatch.setattr(baton.gateway.http.protocol, limit, 0.0)
    monkeypatch.setattr(LimitedProtocol, "_time_out", timed_out)
    body = json.dumps(COMPLETION).encode()
    wire.writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    await asyncio.wait_for(passed.wait(), BOUND_S)
    wire.writer.write(body)
    door.finish(1)
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")
    door.finish(0, key=await door.accept())
    assert (await wire.answer()).status == 200


async def test_a_body_that_comes_bit_by_bit_has_one_time_for_all_of_it(
    door: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baton.gateway.http.protocol, "BODY_S", 0.0)
    wire = await begun(door, 100)
    wire.writer.write(b"{")
    answer = await wire.answer()
    assert answer.status == 408
    assert answer.error["message"].startswith("no whole body within")
    assert await wire.closed()


async def test_a_stream_may_take_longer_than_its_request(door: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.gateway.http.event_stream, "KEEP_ALIVE_S", 0.01)
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 10, "stream": True}).encode()
    wire = await begun(door, len(body))
    monkeypatch.setattr(baton.gateway.http.protocol, "REQUEST_S", 0.01)
    wire.writer.write(body)
    await door.accept()
    door.decode.send_tokens(step_token(0))
    assert (await wire.head()).status == 200
    while await wire.chunk() != b": keep-alive\n\n":
        pass
    door.finish(1)
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")


async def test_a_mistake_of_ours_has_the_shape_of_all_errors(door: HttpGateway) -> None:
    async def handler(call: HttpCall) -> Response:
        raise KeyError(call.request_id)

    app = App(door.context)
    app.add("/mistake", handler, method="GET", summary="")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/mistake", "headers": [], "query_string": b""}
    await app(scope, receive, send)
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["code"] == "internal"


async def test_what_is_no_http_is_refused(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
    assert (await wire.answer()).error["code"] == "invalid_http"
    assert await wire.closed()


async def test_another_media_type_is_refused(door: HttpGateway) -> None:
    answer = await door.call("POST", "/v1/completions", COMPLETION, content_type="application/x-www-form-urlencoded")
    assert answer.status == 415


async def test_the_clients_request_id_is_used_and_one_is_drawn_without(door: HttpGateway) -> None:
    answer = await door.call("POST", "/v1/completions", {}, x_request_id="mine-1")
    assert (answer.headers["x-request-id"], answer.error["request_id"]) == ("mine-1", "mine-1")
    assert (await door.call("GET", "/health")).headers["x-request-id"]


async def test_a_request_id_that_logs_cannot_show_is_refused(door: HttpGateway) -> None:
    for request_id in ("a" * 257, "two words", "\xe9"):
        answer = await door.call("GET", "/health", x_request_id=request_id)
        assert (answer.status, answer.error["param"]) == (400, "x-request-id"), request_id


async def test_a_deadline_that_is_none_is_refused(door: HttpGateway) -> None:
    for seconds in ("-1", "0", "nan", "inf", "soon"):
        answer = await door.call("POST", "/v1/completions", COMPLETION, x_request_timeout_s=seconds)
        assert (answer.status, answer.error["param"]) == (400, "x-request-timeout-s"), seconds


async def test_a_deadline_that_passes(door: HttpGateway) -> None:
    answer = await door.call("POST", "/v1/completions", COMPLETION, x_request_timeout_s="0.01")
    assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")


async def test_a_body_that_does_not_come_is_not_waited_for(door: HttpGateway) -> None:
    wire = await door.connect()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout-s: 0.05\r\ncontent-length: 9\r\n\r\n{"
    wire.writer.write(head.encode())
    assert (await wire.answer()).error["code"] == "request_timeout"
    assert await wire.closed()


async def test_a_batch_that_can_never_run_is_refused() -> None:
    async with open_http_gateway("--max-concurrent-requests", "2") as door:
        answer = await door.call("POST", "/v1/completions", {"prompt": ["a", "b", "c"]})
        assert (answer.status, answer.error["param"]) == (400, "prompt")


async def test_too_many_requests_are_told_when_to_come_back() -> None:
    async with open_http_gateway("--max-concurrent-requests", "1") as door:
        await door.stream({})
        answer = await door.call("POST", "/v1/completions", COMPLETION)
        assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("1", "1000")


async def test_each_token_is_an_event_when_it_comes(door: HttpGateway) -> None:
    wire = await door.stream({}, x_request_id="r1")
    head = await wire.head()
    assert head.headers["content-type"].startswith("text/event-stream")
    first = json.loads((await wire.chunk()).removeprefix(b"data: "))
    assert (first["id"][:5], first["choices"][0]["index"]) == ("cmpl-", 0)
    door.finish(1)
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_a_stream_cancels_its_request(door: HttpGateway) -> None:
    wire = await door.stream({})
    await wire.head()
    wire.writer.close()
    await door.cancelled()


async def test_a_client_that_leaves_before_the_answer_cancels_its_request(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("POST", "/v1/completions", json.dumps(COMPLETION).encode())
    await door.accept()
    wire.writer.close()
    await door.cancelled()


@pytest.mark.parametrize("size", [10, 200_000])
async def test_a_client_that_leaves_while_a_further_request_waits_cancels_its_request(
    door: HttpGateway, size: int
) -> None:
    wire = await door.stream({})
    wire.send("POST", "/v1/completions", b" " * size, content_type="application/json")
    wire.send("GET", "/health")
    await wire.writer.drain()
    wire.writer.close()
    await door.cancelled()


async def test_a_client_that_leaves_within_its_body_is_forgotten(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    wire.writer.close()
    assert (await door.call("GET", "/health")).status == 200
    assert door.serving.running == 0


async def test_a_stream_that_fails_midway_ends_with_an_error_event(
    door: HttpGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await door.stream({}, x_request_timeout_s=str(LIMIT_S))
    assert (await wire.head()).status == 200
    let_limit_pass(monkeypatch)
    *_, event = (await wire.chunks()).decode().strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


async def test_an_aborted_stream_says_so(door: HttpGateway) -> None:
    wire = await door.stream({}, x_request_id="r1")
    await wire.head()
    await wire.chunk()
    assert await door.serving.abort(["r1"]) == ["r1"]
    assert b'"code":"cancelled"' in await wire.chunks()


async def test_a_silent_stream_is_kept_alive(door: HttpGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.gateway.http.event_stream, "KEEP_ALIVE_S", 0.01)
    wire = await door.stream({})
    await wire.head()
    while await wire.chunk() == b": keep-alive\n\n":  # the token may take longer
        pass
    assert await wire.chunk() == b": keep-alive\n\n"
    door.finish(1)
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_lost_its_node_says_so_in_a_comment_and_goes_on(door: HttpGateway) -> None:
    wire = await door.stream({})
    await wire.head()
    await wire.chunk()
    door.decode.answers.put_nowait(None)
    notice = await wire.chunk()
    assert notice.startswith(b": ")
    assert notice.endswith(b"\n\n")
    door.finish(1, key=await door.accept())
    assert (await wire.chunks()).endswith(b"data: [DONE]\n\n")


async def test_the_receipt_comes_on_request(door: HttpGateway) -> None:
    wire = await door.stream({}, x_baton_receipt="1")
    await wire.head()
    door.finish(1)
    assert b'"baton":{"receipt":{"path":"local"' in await wire.chunks()


async def test_requests_that_are_sent_together_are_answered_in_order(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("GET", "/health")
    wire.send("GET", "/version")
    assert (await wire.answer()).json == {"status": "ok"}
    assert "version" in (await wire.answer()).json


async def test_one_prompt_that_fails_ends_the_others(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("POST", "/v1/completions", json.dumps({"prompt": [[1, 2], [1 << 30]], "stream": True}).encode())
    answer = await wire.answer()
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert door.serving.running == 0


async def test_a_slow_clients_tokens_wait_and_come_together(door: HttpGateway) -> None:
    wire = await door.stream({"max_tokens": 4000})
    transport = wire.writer.transport
    assert isinstance(transport, asyncio.Transport)
    transport.pause_reading()
    for index in range(1, 3000):
        door.decode.send_tokens(step_token(index))
    door.finish(3000)
    transport.resume_reading()
    await wire.head()
    events = (await wire.chunks()).decode().strip().split("\n\n")
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])
    assert text == door.serving.model.tokenizer.decode([300 + index for index in range(3001)])
