"""A model whose template shows tools in an unknown format: a header of each answer to tools says so, at every API."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.chat.checkpoints import TEMPLATES
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
USER = [{"role": "user", "content": "Hi"}]
# Each API's path, its body with tools, and what its body adds to force a call.
APIS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "max_tokens": 5, "tools": [{"type": "function", "function": FUNCTION}]},
        {"tool_choice": "required"},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 5,
            "model": "llama",
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        },
        {"tool_choice": {"type": "any"}},
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 5, "tools": [{"type": "function", **FUNCTION}]},
        {"tool_choice": "required"},
    ),
}  # fmt: skip


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[HttpGateway]:
    template = tmp_path / "unknown.jinja"
    template.write_text(TEMPLATES["unknown"])
    async with open_http_gateway(template=template) as opened:
        yield opened


async def answered(door: HttpGateway, path: str, body: dict[str, Any]) -> Answer:
    """Sends one request, which the decode node answers with one token, and returns the answer's head."""
    wire = await door.connect()
    wire.send("POST", path, json.dumps(body).encode(), connection="close")
    key = await door.accept()
    door.finish(0, key=key)
    head = await wire.head()
    await wire.closed()
    return head


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_with_tools_gets_a_header(api: str, stream: bool, door: HttpGateway) -> None:
    path, body, _ = APIS[api]
    head = await answered(door, path, {**body, "stream": stream})
    assert head.status == 200
    assert "come out as text" in head.headers["x-baton-warning"]


@pytest.mark.parametrize("api", APIS)
async def test_requests_whose_calls_are_read_and_requests_without_tools_get_none(api: str, door: HttpGateway) -> None:
    path, body, forced = APIS[api]
    without_tools = {name: value for name, value in body.items() if name != "tools"}
    for other in (without_tools, {**body, **forced}):
        head = await answered(door, path, other)
        assert head.status == 200
        assert "x-baton-warning" not in head.headers


async def test_a_template_in_a_known_format_gets_none() -> None:
    path, body, _ = APIS["chat"]
    async with open_http_gateway() as door:
        assert "x-baton-warning" not in (await answered(door, path, body)).headers
