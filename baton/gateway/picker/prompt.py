"""Reads from a request's body what the choice of a gateway needs: the conversation's key, and the size. Pure.

Every turn of a conversation begins with the turns before it. So the key comes from what all turns share: the session's
name, or else the prompt up to the first message of the user. For a body that is not JSON, or too long to be parsed, it
comes from the first bytes of the text; gateways refuse malformed bodies themselves.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

LOOK_BYTES = 64 << 10
"""Most bytes of a body that are read."""

_PROMPT_CHARACTERS = 1024
_RAW_BYTES = 1024
_TEXT = re.compile(rb'"(?:messages|prompt|input)"\s*:')
_BYTES_PER_TOKEN = 4
_OUTPUT_TOKENS, _OUTPUT_TOKENS_MOST = 256, 4096
_TOKENS_MOST = 1 << 20
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True)
class PickedPrompt:
    """The facts about a prompt that the choice of a gateway needs.

    Attributes:
        key: the conversation's key; None if the body shows none.
        tokens: estimated tokens of prompt and output.
    """

    key: bytes | None
    tokens: int


def look(body: bytes, *, whole: bool, length: int | None = None, session: str = "") -> PickedPrompt:
    """Reads key and size from a body.

    Args:
        body: the body's first bytes.
        whole: whether `body` is the whole body.
        length: length of the whole body in bytes; None: unknown.
        session: the session's name in the request's headers, or empty.
    """
    prompt_tokens = max(len(body), length or 0) // _BYTES_PER_TOKEN
    data = _parse(body) if whole and len(body) <= LOOK_BYTES else None
    output_tokens = _OUTPUT_TOKENS if data is None else _output_tokens(data)
    session = session or _session(data)
    if session:
        shared: bytes | None = b"session " + session.encode(errors="replace")
    elif data is not None:
        shared = _beginning(data)
    else:
        found = _TEXT.search(body, 0, LOOK_BYTES)
        shared = None if found is None else body[found.start() : found.start() + _RAW_BYTES]
    key = None if shared is None else blake2b(shared, digest_size=16).digest()
    return PickedPrompt(key, min(prompt_tokens + output_tokens, _TOKENS_MOST))


def _parse(body: bytes) -> Mapping[str, Any] | None:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None


def _session(data: Mapping[str, Any] | None) -> str:
    options = None if data is None else data.get("baton")
    value = options.get("session_id") if isinstance(options, dict) else None
    return value if isinstance(value, str) else ""


def _output_tokens(data: Mapping[str, Any]) -> int:
    for name in _LIMITS:
        value = data.get(name)
        if isinstance(value, int) and value > 0:
            return min(value, _OUTPUT_TOKENS_MOST)
    return _OUTPUT_TOKENS


def _beginning(data: Mapping[str, Any]) -> bytes | None:
    """Returns what all turns of the conversation begin with."""
    system = data.get("system") or data.get("instructions")
    for name in ("messages", "input", "prompt"):
        value = data.get(name)
        if isinstance(value, str):
            return orjson.dumps([system, value[:_PROMPT_CHARACTERS]])
        if isinstance(value, list) and value:
            return orjson.dumps([system, _first_turn(value)])
    return None


def _first_turn(items: list[Any]) -> list[Any]:
    """Returns the items up to the first message of the user. Of a prompt of token ids, returns the first ids."""
    for number, item in enumerate(items):
        if isinstance(item, dict) and item.get("role") == "user":
            return items[: number + 1]
    return items[:_PROMPT_CHARACTERS]
