"""A server with OpenAI's API that is not Baton: small, scripted, and as strict as a test wants."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.tcp_server import tcp_server

Writer = asyncio.StreamWriter


@dataclass
class StandIn:
    """Answers streams with one token a chunk.

    Args:
        refuses: fields of bodies that it answers with 400.
        first_chunks: tokens that come together in the first chunk with text.
        behave: called with each request's number (from 0, those of the probe too) and the writer, in place of a good
            answer; returns whether it has answered.
    """

    refuses: tuple[str, ...] = ()
    words_of_template: int = 10  # tokens that a chat's template adds
    tokens_per_word: int = 1
    running_usage: bool = False
    behave: Callable[[int, Writer], Awaitable[bool]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            start, *lines = head.decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await reader.readexactly(int(headers["content-length"]))
            await self._answer(start.split()[1], headers, body, writer)

    async def _answer(self, path: str, headers: dict[str, str], body: bytes, writer: Writer) -> None:
        if path == "/v1/models":
            await plain(writer, 200, {"object": "list", "data": [{"id": "stand-in", "max_model_len": 2048}]})
            return
        asked = json.loads(body)
        number = len(self.bodies)
        self.bodies.append(asked)
        self.headers.append(headers)
        wrong = [name for name in self.refuses if name in asked or name in asked.get("stream_options", {})]
        if wrong or ("token_ids" in self.refuses and isinstance(asked.get("prompt"), list)):
            await plain(writer, 400, {"error": {"message": f"unknown {wrong}", "type": "BadRequestError", "code": 400}})
        elif self.behave is None or not await self.behave(number, writer):
            await self.stream(writer, asked)

    def prompt_tokens(self, asked: dict[str, Any]) -> int:
        if "messages" in asked:
            words: str = asked["messages"][0]["content"]
            return self.tokens_per_word * len(words.split()) + self.words_of_template
        prompt = asked["prompt"]
        return len(prompt) if isinstance(prompt, list) else self.tokens_per_word * len(prompt.split())

    async def stream(self, writer: Writer, asked: dict[str, Any]) -> None:
        """A whole answer as servers send it: a role first, usage in a chunk of its own, then [DONE]."""
        options = asked.get("stream_options", {})
        prompt, count = self.prompt_tokens(asked), asked["max_tokens"]
        given = len(asked.get("baton", {}).get("output_token_ids", ()))
        begin(writer)
        if "messages" in asked:
            chunk(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(given, count):
            reason = "length" if index == count - 1 else None
            text = {"delta": {"content": "a"}} if "messages" in asked else {"text": "a"}
            data: dict[str, Any] = {"choices": [{"index": 0, **text, "finish_reason": reason}]}
            if asked.get("return_token_ids"):
                data["choices"][0]["token_ids"] = [index]
            if self.running_usage and options.get("continuous_usage_stats"):
                data["usage"] = {"prompt_tokens": prompt, "completion_tokens": index + 1}
            chunk(writer, data)
            await asyncio.sleep(0)
        if options.get("include_usage"):
            chunk(writer, {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": count}})
        part(writer, b": a comment\n\ndata: [DONE]\n\n")
        part(writer, b"")
        await writer.drain()


def begin(writer: Writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")


def chunk(writer: Writer, data: dict[str, Any]) -> None:
    part(writer, b"data: " + json.dumps(data).encode() + b"\n\n")


def part(writer: Writer, data: bytes) -> None:
    """One part of a chunked body; the empty one ends it."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def plain(writer: Writer, status: int, body: object, **headers: str) -> None:
    """An answer that is not a stream."""
    data = json.dumps(body).encode()
    lines = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    writer.write(f"HTTP/1.1 {status} Status\r\n{head}\r\n".encode() + data)
    await writer.drain()


@asynccontextmanager
async def standing_in(server: StandIn) -> AsyncIterator[StandIn]:
    """Serves on a free port."""
    async with tcp_server(server.serve) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server
