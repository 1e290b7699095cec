"""Bodies as Codex sends them are served by a real gateway, which names what has no effect."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, open_http_gateway, step_token

# As Qwen's, but with the tools' names only: scripted nodes have room for 1,000 tokens.
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor %}Call them in <tool_call></tool_call>.
{%- for message in messages %} {{ message.reasoning_content }}{{ message.content }}
{%- for call in message.tool_calls or [] %} <tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
"""
BODIES = Path(__file__).parent / "bodies"
NAMES = sorted(path.stem for path in BODIES.glob("codex_*.json"))


def body_of(name: str) -> dict[str, Any]:
    body = json.loads((BODIES / f"{name}.json").read_text())
    assert isinstance(body, dict)
    return body


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[HttpGateway]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    async with open_http_gateway(template=template) as opened:
        yield opened


async def answered(door: HttpGateway, body: dict[str, Any]) -> Answer:
    """The head of the answer, and its events as the body."""
    wire = await door.connect()
    wire.send("POST", "/v1/responses", json.dumps(body).encode(), content_type="application/json")
    await door.accept()
    door.decode.send_tokens(step_token(0))
    door.finish(1)
    answer = await wire.head()
    answer.body = await wire.chunks()
    return answer


def test_there_are_bodies_of_every_kind() -> None:
    assert len(NAMES) == 6


@pytest.mark.parametrize("name", NAMES)
async def test_a_body_of_codex_is_answered_as_codex_reads_it(door: HttpGateway, name: str) -> None:
    answer = await answered(door, body_of(name))
    found = events(answer.body)
    assert answer.status == 200
    assert [found[0].name, found[-1].name] == ["response.created", "response.incomplete"]
    last = found[-1].data["response"]
    assert Response.model_validate(last).output
    assert (last["store"], last["background"]) == (False, False)
    assert last["usage"]["total_tokens"] > 0


async def test_what_the_model_does_not_see_is_named_in_a_header(door: HttpGateway) -> None:
    wire = await door.connect()
    wire.send("POST", "/v1/responses", json.dumps(body_of("codex_later_turn")).encode())
    await door.accept()
    door.decode.send_tokens(step_token(0))
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode()
    warnings = [line for line in head.split("\r\n") if line.startswith("x-baton-warning")]
    parts = (
        "web_search: these run at OpenAI",
        "grammar of apply_patch",
        "web_search_call",
        "compaction",
        "input_image",
    )
    for part in parts:
        assert any(part in line for line in warnings), part
