"""Serializes a prepared conversation: a line of JSON, followed by the prompt, which may be large.

It does not use pickle, because the gateway must not unpickle what an untrusted template produced.
"""

import json
from dataclasses import asdict, replace

from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.types import PreparedChat


def packed(prepared: PreparedChat) -> bytes:
    """Serializes a conversation, whose texts must have no halves of surrogate pairs."""
    prompt = prepared.prompt.encode()
    named = b"" if prepared.named is None else prepared.named.encode()
    fields = asdict(replace(prepared, prompt="", named=None))
    head = {**fields, "prompt_bytes": len(prompt), "has_name": prepared.named is not None}
    return b"".join((json.dumps(head).encode(), b"\n", prompt, named))


def unpacked(content: bytes) -> PreparedChat:
    start = content.index(b"\n") + 1
    values = json.loads(content[:start])
    stop = start + values.pop("prompt_bytes")
    if values.pop("has_name"):
        values["named"] = content[stop:].decode()
    if values["grammar"] is not None:
        values["grammar"] = Grammar(GrammarKind(values["grammar"]["kind"]), values["grammar"]["text"])
    values["stop_token_ids"] = tuple(values["stop_token_ids"])
    return PreparedChat(**{**values, "prompt": content[start:stop].decode()})
