"""What HTTP asks of every server, on real connections: hosts, methods, codings, framing, upgrades."""

import gzip
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from baton.gateway.http.routes import ROUTES
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

TOKENIZE = json.dumps({"prompt": "ab"}).encode()
JSON = "content-type: application/json"
PAGES = ("/openapi.json",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def ask(door: HttpGateway, *lines: str, body: bytes = b"") -> Answer:
    """The answer to a request with this head."""
    wire = await door.connect()
    wire.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    return await wire.answer(has_body=not lines[0].startswith("HEAD"))


async def post(door: HttpGateway, *lines: str, body: bytes = TOKENIZE) -> Answer:
    head = ("POST /tokenize HTTP/1.1", "host: localhost", f"content-length: {len(body)}")
    return await ask(door, *head, *lines, body=body)


# The other methods of this path are those of a stored response with that id.
LIKE_AN_ID = "/v1/responses/input_tokens"
PATHS = [route.path for route in ROUTES if "{" not in route.path and route.path != LIKE_AN_ID]


@pytest.mark.parametrize("path", [*PATHS, "/v1/models/x", *PAGES])
async def test_a_method_that_a_path_does_not_have_is_refused_with_those_that_it_has(
    door: HttpGateway, path: str
) -> None:
    takes_body = any(route.path == path and route.body is not None for route in ROUTES)
    for method in ("DELETE", "OPTIONS", *(("GET", "HEAD") if takes_body else ("POST",))):
        answer = await door.call(method, path, b"{}", content_type="application/json")
        assert (answer.status, answer.headers["allow"]) == (405, "POST" if takes_body else "GET, HEAD"), method


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ((), 400),
        (("a", "b"), 400),
        (("a", "a"), 400),
        (("a, b",), 400),
        (("a b",), 400),
        (("user@a",), 400),
        (("a/b",), 400),
        (("a:b",), 400),
        (("\xff",), 400),
        (("",), 200),
        (("a",), 200),
        (("a_b.example:8000",), 200),
        (("127.0.0.1:1",), 200),
        (("[::1]:80",), 200),
    ],
)
async def test_a_request_has_one_host(door: HttpGateway, hosts: tuple[str, ...], status: int) -> None:
    answer = await ask(door, "GET /health HTTP/1.1", *(f"host: {host}" for host in hosts))
    assert answer.status == status
    if status == 400:
        assert (answer.error["code"], answer.error["param"]) == ("invalid_http", "host")


async def test_a_request_of_http_1_0_needs_no_host(door: HttpGateway) -> None:
    assert (await ask(door, "GET /health HTTP/1.0")).status == 200
    assert (await ask(door, "GET /health HTTP/1.0", "host: a", "host: b")).status == 400


@pytest.mark.parametrize("version", ["HTTP/2.0", "HTTP/0.9"])
async def test_another_version_of_http_is_refused(door: HttpGateway, version: str) -> None:
    answer = await ask(door, f"GET /health {version}", "host: a")
    assert (answer.status, answer.headers["connection"]) == (505, "close")


async def test_a_proxys_method_is_refused(door: HttpGateway) -> None:
    assert (await ask(door, "CONNECT localhost:1 HTTP/1.1", "host: a")).status == 501


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate", "gzip, identity", "zstd"])
async def test_a_compressed_body_is_refused_with_what_is_accepted(door: HttpGateway, coding: str) -> None:
    answer = await post(door, JSON, f"content-encoding: {coding}", body=gzip.compress(TOKENIZE))
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
    assert coding in answer.error["message"]


@pytest.mark.parametrize("coding", ["identity", "Identity", ""])
async def test_a_body_may_say_that_it_is_not_compressed(door: HttpGateway, coding: str) -> None:
    assert (await post(door, JSON, f"content-encoding: {coding}")).status == 200


@pytest.mark.parametrize("charset", ["latin-1", "utf-16", '"iso-8859-15"'])
async def test_a_body_of_another_charset_is_refused_by_its_name(door: HttpGateway, charset: str) -> None:
    answer = await post(door, f"{JSON}; a=b; charset={charset}")
    assert (answer.status, answer.headers["accept"]) == (415, "application/json")
    assert "charset" in answer.error["message"]


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf-8"', "us-ascii"])
async def test_a_body_may_say_that_it_is_utf_8(door: HttpGateway, charset: str) -> None:
    assert (await post(door, f"{JSON}; Charset={charset}")).status == 200


@pytest.mark.parametrize("lines", [("content-type: text/plain",), ("content-type: application/json, text/plain",)])
async def test_a_body_of_another_type_is_refused_with_what_is_accepted(
    door: HttpGateway, lines: tuple[str, ...]
) -> None:
    answer = await post(door, *lines)
    assert (answer.status, answer.headers["accept"]) == (415, "application/json")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (("transfer-encoding: chunked", "content-length: 3"), 400),
        (("content-length: 3", "content-length: 3"), 400),
        (("content-length: 3", "content-length: 4"), 400),
        (("content-length: 3, 3",), 400),
        (("content-length: -1",), 400),
        (("content-length: +3",), 400),
        (("content-length: 999999999999",), 413),
        (("transfer-encoding: gzip, chunked",), 501),
        (("transfer-encoding: gzip",), 501),
        (("transfer-encoding: identity",), 501),
    ],
)
async def test_a_body_whose_end_is_in_doubt_is_refused_and_the_connection_closed(
    door: HttpGateway, lines: tuple[str, ...], status: int
) -> None:
    wire = await door.connect()
    head = ("POST /tokenize HTTP/1.1", "host: a", JSON, *lines, "", "")
    wire.writer.write("\r\n".join(head).encode() + b"3\r\n{ }\r\n0\r\n\r\n")
    answer = await wire.answer()
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    assert await wire.closed()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_a_request_that_asks_for_another_protocol_keeps_its_body_and_its_connection(
    door: HttpGateway, protocol: str
) -> None:
    """As the HTTP client of Java asks by default."""
    wire = await door.connect()
    upgrade = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    head = ("POST /tokenize HTTP/1.1", "host: a", JSON, f"content-length: {len(TOKENIZE)}", *upgrade, "", "")
    for cut in (len(TOKENIZE), 3, 0):
        wire.writer.write("\r\n".join(head).encode() + TOKENIZE[:cut])
        await wire.writer.drain()
        wire.writer.write(TOKENIZE[cut:])
        answer = await wire.answer()
        assert (answer.status, answer.json["count"] > 0) == (200, True)
    wire.send("GET", "/health")
    assert (await wire.answer()).status == 200


async def test_a_body_that_is_announced_is_asked_for(door: HttpGateway) -> None:
    wire = await door.connect()
    head = ("POST /tokenize HTTP/1.1", "host: a", JSON, f"content-length: {len(TOKENIZE)}", "expect: 100-continue")
    wire.writer.write("\r\n".join([*head, "", ""]).encode())
    assert (await wire.head()).status == 100
    wire.writer.write(TOKENIZE)
    assert (await wire.answer()).status == 200


async def test_a_wrong_request_after_another_is_not_answered_in_its_place(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("POST", "/v1/completions", json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode())
    await door.accept()
    wire.writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert await wire.closed()
    await door.cancelled()


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("/chat/completions", "give the client a base URL that ends in /v1"),
        ("/responses", "give the client a base URL that ends in /v1"),
        ("//v1/chat/completions", "give the client a base URL without a slash at the end"),
        ("/v1//completions", "give the client a base URL without a slash at the end"),
        ("/v1/v1/messages", "give the client a base URL without /v1"),
        ("/responses/resp_1/cancel", "give the client a base URL that ends in /v1"),
        ("/v1/chat/completions/", "leave out the slash at the end"),
        ("/v1/images/generations", "see /docs"),
        ("/v1/", "see /docs"),
    ],
)
async def test_a_path_that_does_not_exist_is_answered_with_what_is_wrong(
    door: HttpGateway, path: str, cure: str
) -> None:
    answer = await door.call("POST", path, b"{}", content_type="application/json")
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"POST {path} does not exist; {cure}"
