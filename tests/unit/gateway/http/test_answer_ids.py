"""Each answer has an id of its own, whatever request ids the clients send."""

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.gateway.http.http_gateway import HttpGateway, open_http_gateway, step_token

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
DOORS = {
    "/v1/chat/completions": ("chatcmpl-", CHAT),
    "/v1/completions": ("cmpl-", {"prompt": "Hello", "max_tokens": 2}),
    "/v1/messages": ("msg_", CHAT),
    "/v1/responses": ("resp_", {"input": "Hello", "max_output_tokens": 2}),
}


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with open_http_gateway() as opened:
        yield opened


@pytest.mark.parametrize("path", DOORS)
async def test_two_answers_to_one_request_id_have_two_ids(door: HttpGateway, path: str) -> None:
    prefix, body = DOORS[path]
    ids = set()
    for _ in range(2):
        wire = await door.connect()
        wire.send("POST", path, json.dumps(body).encode(), content_type="application/json", x_request_id="a/b")
        key = await door.accept()
        door.decode.send_tokens(step_token(0), key=key)
        door.finish(1, key=key)
        answer = await wire.answer()
        assert answer.headers["x-request-id"] == "a/b"
        ids.add(answer.json["id"])
    assert len(ids) == 2
    assert all(re.fullmatch(prefix + "[0-9a-f]{32}", each) for each in ids)


async def test_an_answers_id_ends_its_request_alone(door: HttpGateway) -> None:
    """The first chunk of a stream has the id, and two streams may share a request id."""
    wires, ids = [], []
    for _ in range(2):
        wire = await door.connect()
        body = {"prompt": "Hello", "max_tokens": 9, "stream": True}
        wire.send("POST", "/v1/completions", json.dumps(body).encode(), x_request_id="same")
        door.decode.send_tokens(step_token(0), key=await door.accept())
        wires.append(wire)
        await wire.head()
        first: dict[str, Any] = json.loads((await wire.chunk()).removeprefix(b"data: "))
        ids.append(first["id"])
    assert await door.serving.abort([ids[1], "other"]) == [ids[1]]
    assert b"aborted" in await wires[1].chunks()
    assert await door.serving.abort(["same"]) == ["same"]
    assert b"aborted" in await wires[0].chunks()
