"""Keeps special tokens in clients' texts from acting as special tokens, unlike those that the template writes.

With `--user-special-tokens text`, the tokenizer knows special tokens only by secret names
(`baton.gateway.text.tokenizer`). Before rendering, a mark is put into each special token of a client. After it, the
unmarked ones must be the template's, and are replaced by their secret names.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from baton.gateway.text.chat.types import ChatRequest

_PRIVATE = range(0xF0000, 0xFFFFE)  # private-use characters, which texts do not contain
_MARK_CHARACTERS = 4


class UserText:
    """Marks clients' special tokens, and renames the template's. Threads may share it.

    Args:
        aliases: secret names of the special tokens by their own names.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._mark = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_MARK_CHARACTERS))
        longest_first = "|".join(map(re.escape, sorted(aliases, key=len, reverse=True)))
        # A lookahead finds every place where a special token begins, because they may overlap.
        self._begins = re.compile(f"(?={longest_first})")
        # NOTE: the mark follows a token's first character, so that of a one-character token is after the token.
        self._written = re.compile(f"(?:{longest_first})(?!{self._mark})")
        self._beginnings = frozenset(token[:size] for token in aliases for size in range(1, len(token)))
        self._longest = max(map(len, aliases))
        # The template may write the mark unchanged, in Python's escapes, or as ASCII JSON.
        shown = ascii(self._mark)[1:-1]
        in_json = "".join(rf"\u{unit:04x}" for unit in _utf16(self._mark))
        self._marks = re.compile("|".join(map(re.escape, (self._mark, shown, in_json))))

    def mark(self, request: ChatRequest) -> ChatRequest:
        """Returns the request with marks in the special tokens of all its texts."""
        return replace(
            request,
            messages=self._marked(list(request.messages)),
            tools=self._marked(list(request.tools)),
            template_kwargs=self._marked(dict(request.template_kwargs)),
        )

    def separate(self, rendered: str) -> tuple[str, str]:
        """Returns the prompt, and the prompt with secret names in place of the template's special tokens."""
        named = self._written.sub(lambda found: self._aliases[found[0]], rendered)
        return self._marks.sub("", rendered), self._marks.sub("", named)

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, list | tuple):
            return [self._marked(each) for each in value]
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(each) for key, each in value.items()}
        return value

    def _marked_text(self, text: str) -> str:
        places = {found.start() for found in self._begins.finditer(text)}
        # The template may join two texts of the client, which could form a special token together.
        end = len(text)
        places |= {at for at in range(max(0, end - self._longest), end) if text[at:] in self._beginnings}
        if not places:
            return text
        cuts = [0, *(at + 1 for at in sorted(places)), end]
        return self._mark.join(text[start:stop] for start, stop in pairwise(cuts))


def _utf16(text: str) -> list[int]:
    units = text.encode("utf-16-be")
    return [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
