"""Reads server-sent events of OpenAI-compatible servers: from bytes to payloads to a load client's values. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

DONE = b"[DONE]"


@dataclass
class SseReader:
    """Cuts a stream of bytes, in pieces of any size, into the payloads of its `data:` lines."""

    _rest: bytes = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@dataclass(frozen=True)
class SseChunk:
    """The content of one payload.

    Args:
        content: whether it has text, reasoning or a tool call.
        output_tokens: tokens of output so far, if the payload reports them.
        token_ids: token ids of the output, if they were asked for.
        finished: whether it has the reason why the output ended.
        error: type and message; empty: none.
    """

    content: bool = False
    output_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    finished: bool = False
    usage: Mapping[str, int] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)
    error: tuple[str, str] = ("", "")


def read_chunk(payload: bytes) -> SseChunk:
    """Reads a chunk of a chat or a completion.

    Raises:
        ValueError: it is not a chunk.
    """
    found = orjson.loads(payload)
    if not isinstance(found, dict):
        raise ValueError(f"a chunk that is not an object: {payload[:80]!r}")
    if found.get("error"):
        return SseChunk(error=read_error(found, "error in the stream"))
    content = finished = False
    token_ids: tuple[int, ...] = ()
    for choice in found.get("choices") or ():
        delta = choice.get("delta") or choice
        content = content or any(delta.get(name) for name in _CONTENT)
        finished = finished or choice.get("finish_reason") is not None
        if choice.get("token_ids"):
            token_ids = tuple(map(int, choice["token_ids"]))
    usage = read_usage(found.get("usage") or {})
    receipt = (found.get("baton") or {}).get("receipt") or {}
    return SseChunk(content, usage.get("output"), token_ids, finished, usage, receipt)


# Fields of a chat's delta and of a completion's choice; servers have two names for reasoning.
_CONTENT = ("content", "text", "reasoning_content", "reasoning", "tool_calls")


def read_usage(found: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's usage under our names."""
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens")
    named = {"prompt": found.get("prompt_tokens"), "cached": cached, "output": found.get("completion_tokens")}
    return {name: int(value) for name, value in named.items() if value is not None}


def read_error(found: object, default: str) -> tuple[str, str]:
    """Type and message of an answer that reports an error, in the forms that servers have."""
    error = found.get("error", found) if isinstance(found, dict) else found
    if not isinstance(error, dict):
        return default, str(error or "")
    kind = error.get("code") if isinstance(error.get("code"), str) else None
    return str(kind or error.get("type") or default), str(error.get("message") or error.get("detail") or "")
