"""Which web pages may call the gateway from a browser: those of the listed origins, and no others."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from baton.gateway.http.cors import AllowedOrigins
from baton.gateway.process.process import check_doors
from baton.settings.gateway_config import GatewaySettings
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

CHAT = "https://chat.example"
LOCAL = "http://localhost:5173"
BODY = {"prompt": [1, 2, 3], "max_tokens": 4}


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway("--cors-origins", f"{CHAT}, {LOCAL}/", asks=True) as opened:
        yield opened


async def preflight(
    door: HttpGateway, origin: str, *, host: str = "localhost", path: str = "/v1/chat/completions"
) -> Answer:
    wire = await door.connect()
    wire.send(
        "OPTIONS",
        path,
        host=host,
        origin=origin,
        access_control_request_method="POST",
        access_control_request_headers="authorization,content-type,x-stainless-lang",
    )
    return await wire.answer(has_body=False)


def cors_headers(answer: Answer) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control")}


@pytest.mark.parametrize("origin", [CHAT, LOCAL])
async def test_a_listed_pages_preflight_is_answered(door: HttpGateway, origin: str) -> None:
    answer = await preflight(door, origin)
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == origin
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", f"{CHAT}.evil", f"{CHAT}:444", "http://chat.example", "HTTPS://CHAT.EXAMPLE"],
)
async def test_no_other_page_is_answered(door: HttpGateway, origin: str) -> None:
    asked = await preflight(door, origin)
    assert asked.status == 405
    got = await door.call("GET", "/v1/models", host="localhost", origin=origin)
    assert got.status == 200
    for answer in (asked, got):
        assert cors_headers(answer) == set()
        assert answer.headers["vary"] == "origin"


async def test_a_listed_page_reads_answers_and_errors(door: HttpGateway) -> None:
    got = await door.call("GET", "/v1/models", host="localhost", origin=CHAT)
    refused = await door.call(
        "POST", "/v1/completions", {"x": 1}, host="localhost", origin=CHAT, content_type="application/json"
    )
    missing = await door.call("GET", "/nothing", host="localhost", origin=CHAT)
    assert (got.status, refused.status, missing.status) == (200, 400, 404)
    for answer in (got, refused, missing):
        assert answer.headers["access-control-allow-origin"] == CHAT
        assert "x-baton-warning" in answer.headers["access-control-expose-headers"]


async def test_a_listed_page_reads_a_stream(door: HttpGateway) -> None:
    wire = await door.stream({}, host="localhost", origin=CHAT, content_type="application/json")
    head = await wire.head()
    assert (head.status, head.headers["access-control-allow-origin"]) == (200, CHAT)


async def test_a_listed_origin_opens_neither_foreign_hosts_nor_bodies_without_a_type(door: HttpGateway) -> None:
    assert (await preflight(door, CHAT, host="evil.example")).status == 403
    got = await door.call("GET", "/v1/models", host="evil.example", origin=CHAT)
    untyped = await door.call("POST", "/v1/completions", BODY, host="localhost", origin=CHAT)
    assert (got.status, untyped.status) == (403, 415)


async def test_an_answer_to_no_page_has_no_such_headers(door: HttpGateway) -> None:
    answer = await door.call("GET", "/v1/models", host="localhost")
    assert cors_headers(answer) == set()


async def test_options_that_are_no_preflight_are_refused_as_ever(door: HttpGateway) -> None:
    answer = await door.call("OPTIONS", "/v1/completions", host="localhost", origin=CHAT)
    assert answer.status == 405


async def test_any_page_may_call_a_gateway_with_keys_but_without_its_credentials(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    async with open_http_gateway("--api-keys", str(file), "--cors-origins", "*", asks=True) as door:
        asked = await preflight(door, "https://any.example", host="models.example")
        keyless = await door.call("GET", "/v1/models", host="models.example", origin="https://any.example")
        keyed = await door.call(
            "GET", "/v1/models", host="models.example", origin="https://any.example", authorization="Bearer secret"
        )
    assert (asked.status, keyless.status, keyed.status) == (204, 401, 200)
    for answer in (asked, keyless, keyed):
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("*", "every web page could send requests"),
        ("chat.example", "is not an origin"),
        ("https://chat.example/path", "leave out the path"),
        ("https://Chat.example", "lower case"),
        ("null", "is not an origin"),
        ("https://*.example", "is not an origin"),
        (f"{CHAT},*", "next to origins"),
        ("https://a\r\nb", "is not an origin"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused_at_start(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_doors(GatewaySettings(cors_origins=text))
    assert caught.value.field == "cors_origins"


@pytest.mark.parametrize(
    "origin", ["app://obsidian.md", "chrome-extension://abc", "tauri://localhost", "http://[::1]:80"]
)
def test_pages_of_applications_may_be_listed(origin: str) -> None:
    assert AllowedOrigins.read(origin, locked=False).allows(origin)


@pytest.mark.parametrize("wanted", ["a b", "x\r\ny: z", "", "a" * 3000, "a,,b"])
def test_malformed_header_names_are_not_repeated(wanted: str) -> None:
    asked = {"origin": CHAT, "access-control-request-method": "POST", "access-control-request-headers": wanted}
    answer = AllowedOrigins.read(CHAT, locked=False).preflight("OPTIONS", asked)
    assert answer is not None
    assert "access-control-allow-headers" not in answer
