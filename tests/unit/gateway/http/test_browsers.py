"""Web pages in a browser on the gateway's machine can reach its port; their requests are refused."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.gateway.http.app import check_not_a_page
from baton.gateway.http.errors import HttpRefusal
from tests.unit.gateway.http.http_gateway import HttpGateway, open_http_gateway

BODY = {"prompt": [1, 2, 3], "max_tokens": 4}
JSON = "application/json"


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway(asks=True) as opened:
        yield opened


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "[::1.evil"]
)
def test_a_page_whose_name_resolves_to_this_machine_is_refused(host: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        with pytest.raises(HttpRefusal) as caught:
            check_not_a_page(method, {"host": host, "content-type": JSON}, listen_host="127.0.0.1")
        assert (caught.value.status, caught.value.code) == (403, "foreign_host")
        assert "BATON_API_KEYS" in str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "10.0.0.7", "app.localhost:1", ""],
)
def test_this_machines_names_and_addresses_are_taken(host: str) -> None:
    check_not_a_page("GET", {"host": host}, listen_host="127.0.0.1")


async def test_every_path_refuses_a_foreign_host(door: HttpGateway) -> None:
    for method, path in (("GET", "/v1/models"), ("GET", "/"), ("GET", "/metrics"), ("POST", "/v1/completions")):
        answer = await door.call(method, path, BODY if method == "POST" else None, host="evil", content_type=JSON)
        assert (answer.status, answer.error["code"]) == (403, "foreign_host")


async def test_a_body_that_a_page_may_send_unasked_is_refused(door: HttpGateway) -> None:
    """A form, or a blob of no type: without a preflight a page can send nothing else."""
    form, multipart = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
    for content_type in (None, "text/plain", form, multipart, "text/plain; application/json"):
        headers = {} if content_type is None else {"content_type": content_type}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
            answer = await door.call("POST", path, BODY, host="127.0.0.1", origin="https://evil.example", **headers)
            assert answer.status == 415


async def test_a_preflight_is_refused_and_no_answer_allows_another_origin(door: HttpGateway) -> None:
    origin = {"host": "localhost", "origin": "https://evil.example"}
    asked = await door.call("OPTIONS", "/v1/completions", access_control_request_method="POST", **origin)
    models = await door.call("GET", "/v1/models", **origin)
    assert (asked.status, models.status) == (405, 200)
    for answer in (asked, models):
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_gateway_with_keys_goes_by_them_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(b"secret").hexdigest()}"\n')
    async with open_http_gateway("--api-keys", str(file), asks=True) as door:
        authorization = "Bearer secret"
        answer = await door.call("GET", "/v1/models", host="models.example", authorization=authorization)
        assert answer.status == 200
        assert (await door.call("GET", "/v1/models", host="models.example")).status == 401


def test_where_others_reach_the_gateway_its_names_are_not_known_but_bodies_have_a_type() -> None:
    check_not_a_page("POST", {"host": "models.example", "content-type": JSON}, listen_host=None)
    check_not_a_page("GET", {"host": "models.example"}, listen_host=None)
    with pytest.raises(HttpRefusal, match="has no type"):
        check_not_a_page("POST", {"host": "models.example"}, listen_host=None)


async def test_a_request_in_json_is_served(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("POST", "/v1/completions", json.dumps(BODY).encode(), host="localhost:8000", content_type=JSON)
    await door.accept()
    door.finish(0)
    assert (await asyncio.wait_for(wire.answer(), 60)).status == 200
