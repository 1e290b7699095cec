"""Bodies as Codex sends them are served by a real gateway, which names what has no effect."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response

from tests.integration.chatting import TEMPLATE
from tests.unit.gateway.http.chat_stream import events
from tests.unit.gateway.http.door import Answer, Door, open_door, step_token

BODIES = Path(__file__).parent / "bodies"
NAMES = sorted(path.stem for path in BODIES.glob("codex_*.json"))


def body_of(name: str) -> dict[str, Any]:
    body = json.loads((BODIES / f"{name}.json").read_text())
    assert isinstance(body, dict)
    return body


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    async with open_door(template=template) as opened:
        yield opened


async def answered(door: Door, body: dict[str, Any]) -> Answer:
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
async def test_a_body_of_codex_is_answered_as_codex_reads_it(door: Door, name: str) -> None:
    answer = await answered(door, body_of(name))
    found = events(answer.body)
    assert answer.status == 200
    assert [found[0].name, found[-1].name] == ["response.created", "response.incomplete"]
    last = found[-1].data["response"]
    assert Response.model_validate(last).output
    assert (last["store"], last["background"]) == (False, False)
    assert last["usage"]["total_tokens"] > 0


async def test_what_the_model_does_not_see_is_named_in_a_header(door: Door) -> None:
    first = (await answered(door, body_of("codex_first_turn"))).headers["x-baton-warning"]
    assert "grammar of apply_patch" in first
    later = await door.connect()
    later.send("POST", "/v1/responses", json.dumps(body_of("codex_later_turn")).encode())
    await door.accept()
    door.decode.send_tokens(step_token(0), key=2)
    door.finish(1, key=2)
    raw = (await later.reader.readuntil(b"\r\n\r\n")).decode()
    warnings = [line for line in raw.split("\r\n") if line.startswith("x-baton-warning")]
    assert any("web_search" in line and "run at OpenAI" in line for line in warnings)
    for left_out in ("web_search_call", "compaction", "input_image", "encrypted reasoning"):
        assert any(left_out in line for line in warnings), left_out
