"""A large body is read in a thread, whichever endpoint it is for, so the event loop goes on serving."""

import threading
from typing import Any

import pytest

import baton.gateway.http.call
from baton.gateway.http.body_reader import parse_object
from baton.gateway.http.routes import ROUTES
from tests.unit.gateway.http.http_gateway import BOUND_S, open_http_gateway

PATHS = [route.path for route in ROUTES if route.body is not None]
WIDE = b'{"a": [' + b"{}," * 30_000 + b"{}]}"


async def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def read_after_the_answer(body: bytes) -> dict[str, Any]:
        assert answered.wait(BOUND_S), "the event loop waits for the body"
        return parse_object(body)

    async with open_http_gateway() as door:
        monkeypatch.setattr(baton.gateway.http.call, "parse_object", read_after_the_answer)
        for path in PATHS:
            answered.clear()
            wire = await door.connect()
            wire.send("POST", path, WIDE, content_type="application/json")
            assert (await door.call("GET", "/health")).status == 200
            answered.set()
            answer = await wire.answer()
            assert (answer.status, b"a is not a parameter of this endpoint" in answer.body) == (400, True), path
