"""Reads from the fields of other APIs how long a prompt should stay cached, and to which session it belongs. Pure.

These fields are hints: what cannot be read has no effect.
"""

import hashlib
from collections.abc import Iterator

from pydantic import BaseModel

from baton.protos.v1 import generation_pb2 as pb

_SESSION_CHARS_MAX = 128
_LEVELS_MAX = 8  # of objects in a body, down to a `cache_control` in the result of a tool
_NESTED = ("content", "function")  # of messages and tools

# By names of `cache_control.ttl` and `prompt_cache_retention`.
_SECONDS = {"5m": 300.0, "1h": 3600.0, "in_memory": 300.0, "in-memory": 300.0, "24h": 86400.0}
_DEFAULT_TTL = "5m"


def set_keep_time(message: pb.GenerateRequest, *, cache_key: object = None, retention: object = None) -> None:
    """Sets session and keep time by OpenAI's fields, unless the message has its own.

    Args:
        cache_key: `prompt_cache_key`, which stands for a session.
        retention: `prompt_cache_retention`, or the `ttl` of a `cache_control`.
    """
    if not message.session_id and isinstance(cache_key, str):
        message.session_id = _session(cache_key)
    seconds = _SECONDS.get(retention) if isinstance(retention, str) else None
    if seconds is not None and not message.HasField("kv_keep_s"):
        message.kv_keep_s = seconds


def longest_ttl(body: object) -> str | None:
    """The longest `ttl` of all `cache_control` in a body; None if it has none."""
    found = set(_ttls(body, _LEVELS_MAX))
    return max(found, key=_SECONDS.__getitem__, default=None)


def _ttls(part: object, levels: int) -> Iterator[str]:
    if isinstance(part, BaseModel):
        control = getattr(part, "cache_control", None)
        inner = [value for name, value in part if isinstance(value, BaseModel | list) and name != "cache_control"]
    elif isinstance(part, dict):
        control, inner = part.get("cache_control"), [part[name] for name in _NESTED if name in part]
    else:
        control, inner = None, part if isinstance(part, list) else []
    if control is not None:
        ttl = control.get("ttl") if isinstance(control, dict) else getattr(control, "ttl", None)
        yield ttl if isinstance(ttl, str) and ttl in _SECONDS else _DEFAULT_TTL
    if levels:
        for each in inner:
            yield from _ttls(each, levels - 1)


def _session(cache_key: str) -> str:
    """The key itself, or a digest of one that is long or has characters that no session may have."""
    if len(cache_key) <= _SESSION_CHARS_MAX and cache_key.isascii() and cache_key.isprintable():
        return cache_key
    return hashlib.sha256(cache_key.encode(errors="surrogatepass")).hexdigest()
