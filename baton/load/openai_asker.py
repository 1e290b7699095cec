"""Sends requests to OpenAI-compatible servers: streams of completions or chats."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.core.types import NO_SLO, Slo
from baton.load.answer import AskError, LoadAnswer
from baton.load.http_stream import HttpStreams
from baton.load.prompts import PromptMaker
from baton.load.sse import DONE, SseChunk, SseReader, read_chunk, read_error
from baton.load.workload import PlannedRequest

_REFUSALS = (429, 503)


@dataclass(frozen=True)
class Dialect:
    """The optional fields that a server accepts; `baton.load.probe` finds them."""

    usage: bool = True  # stream_options.include_usage
    running_usage: bool = True  # ...continuous_usage_stats: how many tokens each chunk has
    ignore_eos: bool = True
    token_ids: bool = True  # prompts of completions as token ids


@dataclass
class OpenAiAsker:
    """Streams from one server.

    Args:
        chat: whether to ask for chats instead of completions.
        extra: further fields of each request's body.
    """

    streams: HttpStreams
    prompts: PromptMaker
    model: str
    chat: bool
    dialect: Dialect = field(default_factory=Dialect)
    slo: Slo | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, request: PlannedRequest) -> bytes:
        return self.encode(*self.question(request))

    def question(self, request: PlannedRequest) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Body and headers of a request."""
        as_ids = self.dialect.token_ids and not self.chat
        prompt: Any = self.prompts.token_ids(request) if as_ids else self.prompts.text(request)
        headers = {"x-request-id": self.prompts.contents.request_id(request.index)}
        if request.session >= 0:
            headers["x-session-id"] = f"bench-{request.session}"
        return self._body(prompt, request.output_tokens), headers

    def request(self, prompt: Any, max_tokens: int) -> bytes:
        """The bytes of a request for a stream."""
        return self.encode(self._body(prompt, max_tokens), {})

    def encode(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
        endpoint = "/v1/chat/completions" if self.chat else "/v1/completions"
        return self.streams.request("POST", endpoint, orjson.dumps(body), {**self._headers(), **headers})

    def _body(self, prompt: Any, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "stream": True, **self.extra}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.dialect.usage:
            body["stream_options"] = {"include_usage": True}
            if self.dialect.running_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if self.dialect.ignore_eos:
            body["ignore_eos"] = True
        return body

    async def ask(self, prepared: bytes, answer: LoadAnswer, token_ids: list[int] | None = None) -> None:
        """Sends a request, as `Asker.ask` describes.

        Args:
            token_ids: token ids of the output so far; new ones are appended.
        """
        running_usage = self.dialect.usage and self.dialect.running_usage
        reading = _Reading(answer, token_ids if token_ids is not None else [], running_usage=running_usage)
        status = await self.streams.send(prepared, reading.on_body)
        if status != 200:
            raise _http_error(status, bytes(reading.refusal))
        if not reading.complete:
            raise AskError("BrokenStream", "the stream ended without its last chunk")

    async def close(self) -> None:
        await self.streams.close()

    def _headers(self) -> dict[str, str]:
        headers = {"x-baton-receipt": "1"}
        slo = self.slo or NO_SLO
        for name, value in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
            if value is not None:
                headers[f"x-baton-{name}-s"] = f"{value:g}"
        return headers


class _Reading:
    """Reads the body of one answer."""

    def __init__(self, answer: LoadAnswer, token_ids: list[int], *, running_usage: bool) -> None:
        self.complete = False
        self.refusal = bytearray()  # the body, if the status is not 200
        self._answer = answer
        self._answer.exact = running_usage
        self._token_ids = token_ids
        self._seen = len(token_ids)  # tokens so far
        self._sse = SseReader()

    def on_body(self, body: bytes, status: int) -> None:
        if status != 200:
            self.refusal += body
            return
        for payload in self._sse.feed(body):
            if payload == DONE:
                self.complete = True
            else:
                self._take(_chunk(payload))

    def _take(self, chunk: SseChunk) -> None:
        answer = self._answer
        if chunk.error != ("", ""):
            kind, detail = chunk.error
            raise AskError(kind, detail)
        total = chunk.output_tokens
        if answer.exact and total is not None:
            if total > self._seen:
                answer.add(total - self._seen)
                self._seen = total
        elif chunk.content:
            answer.exact = False
            answer.add(1)
        self._token_ids += chunk.token_ids
        self.complete = self.complete or chunk.finished
        if chunk.usage:
            answer.usage = chunk.usage
        if chunk.receipt:
            answer.receipt = chunk.receipt


def _chunk(payload: bytes) -> SseChunk:
    try:
        return read_chunk(payload)
    except (ValueError, AttributeError, TypeError) as error:
        raise AskError("BadAnswer", f"no chunk: {error}") from None


def _http_error(status: int, body: bytes) -> AskError:
    try:
        kind, detail = read_error(json.loads(body), "")
    except ValueError:
        kind, detail = "", body[:200].decode(errors="replace")
    return AskError(f"{status} {kind}".rstrip(), detail, refused=status in _REFUSALS)
