"""Sends bodies of the kinds that Claude Code sends to a gateway in front of scripted nodes.

Each JSON file has one request: `path`, `headers` and `body`. It may have the expected `status` (else 200), a part of
the `error`, a part of each of the `warnings`, in their order, and texts that the rendered prompt has or lacks.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from baton.protos.internal.v1 import decode_pb2
from tests.unit.gateway.http.http_gateway import Answer, HttpGateway, Wire, open_http_gateway, step_token

HERE = Path(__file__).parent
CACHED_TOKENS = 16


@dataclass(frozen=True)
class Recorded:
    """One recorded request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    error: str = ""
    warnings: list[str] = field(default_factory=list)
    prompt_has: list[str] = field(default_factory=list)
    prompt_lacks: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, name: str) -> "Recorded":
        return cls(**json.loads((HERE / f"{name}.json").read_text()))


def agent_door() -> AbstractAsyncContextManager[HttpGateway]:
    """A gateway whose template takes tools, and a system message only at the beginning."""
    return open_http_gateway(template=HERE / "agent_template.jinja", max_context_tokens=4000)


@pytest.fixture
async def door() -> AsyncIterator[HttpGateway]:
    async with agent_door() as opened:
        yield opened


@dataclass
class Served:
    """An answer, the warnings of its headers, and the prompt that the decode node got."""

    answer: Answer
    warnings: list[str]
    prompt: str
    prompt_tokens: int


async def served(door: HttpGateway, recorded: Recorded) -> Served:
    wire = await door.connect()
    headers = {"content-type": "application/json", **recorded.headers}
    wire.send("POST", recorded.path, json.dumps(recorded.body).encode(), **headers)
    head = asyncio.create_task(wire.reader.readuntil(b"\r\n\r\n"))
    submission = asyncio.create_task(door.decode.submission())
    await asyncio.wait((head, submission), return_when=asyncio.FIRST_COMPLETED)
    prompt: list[int] = []
    if submission.done():
        prompt = list(submission.result().prompt_token_ids)
        _generate(door, submission.result())
    else:  # answered without a node
        submission.cancel()
    answer, warnings = await _read(wire, await head)
    return Served(answer, warnings, door.serving.model.tokenizer.decode(prompt, skip_special_tokens=False), len(prompt))


def _generate(door: HttpGateway, submitted: decode_pb2.SubmitRequest) -> None:
    """The decode node answers with up to two tokens."""
    cached_tokens = min(CACHED_TOKENS, len(submitted.prompt_token_ids))
    accepted = decode_pb2.Accepted(key=submitted.key, why="short", cached_tokens=cached_tokens)
    door.decode.answers.put_nowait(decode_pb2.SessionResponse(accepted=accepted))
    last = min(1, submitted.sampling.max_tokens - 1)
    if last:
        door.decode.send_tokens(step_token(0), key=submitted.key)
    door.finish(last, key=submitted.key)


async def _read(wire: Wire, head: bytes) -> tuple[Answer, list[str]]:
    status, *lines = head.decode().rstrip().split("\r\n")
    headers = [line.split(": ", 1) for line in lines]
    answer = Answer(int(status.split()[1]), {name.lower(): value for name, value in headers}, b"")
    length = answer.headers.get("content-length")
    answer.body = await wire.chunks() if length is None else await wire.reader.readexactly(int(length))
    return answer, [value for name, value in headers if name.lower() == "x-baton-warning"]


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("claude_code_*.json")))
async def test_a_recorded_request_is_answered_as_its_file_says(door: HttpGateway, name: str) -> None:
    recorded = Recorded.of(name)
    got = await served(door, recorded)
    assert got.answer.status == recorded.status, got.answer.body
    assert recorded.error in got.answer.body.decode()
    assert len(got.warnings) == len(recorded.warnings), got.warnings
    for part, warning in zip(recorded.warnings, got.warnings, strict=True):
        assert part in warning
    for text in recorded.prompt_has:
        assert text in got.prompt
    for text in recorded.prompt_lacks:
        assert text not in got.prompt
