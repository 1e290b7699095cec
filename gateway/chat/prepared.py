"""A prepared conversation as bytes: a line of JSON, and then the prompt as it is, since it may be large.

No pickle: a template had a part in it, and the gateway reads it.
"""

import json
from dataclasses import asdict, replace

from baton.types import Grammar, GrammarKind
from gateway.chat.types import PreparedChat


def packed(prepared: PreparedChat) -> bytes:
    """Its prompt has no half of a surrogate pair."""
    return b"%s\n%s" % (json.dumps(asdict(replace(prepared, prompt=""))).encode(), prepared.prompt.encode())


def unpacked(content: bytes) -> PreparedChat:
    head, _, prompt = content.partition(b"\n")
    values = json.loads(head)
    grammar = values["grammar"]
    return PreparedChat(
        **{
            **values,
            "prompt": prompt.decode(),
            "grammar": None if grammar is None else Grammar(GrammarKind(grammar["kind"]), grammar["text"]),
            "stop_token_ids": tuple(values["stop_token_ids"]),
        }
    )
