"""What clients write stays text: special tokens in a conversation are told apart from those that the template writes.

With `--user-special-tokens text`, the tokenizer knows special tokens by secret names only
(`baton.gateway.text.tokenizer`). A mark inside each one that a client wrote goes through the template; the
unmarked ones are the template's, and get their secret names.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from baton.gateway.text.chat.types import ChatRequest

_PRIVATE = range(0xF0000, 0xFFFFE)  # characters that no text has
_MARK_CHARACTERS = 4


class UserText:
    """Safe to use from several threads.

    Args:
        aliases: secret names of the special tokens, by their own.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self._aliases = aliases
        self._mark = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(_MARK_CHARACTERS))
        longest_first = "|".join(map(re.escape, sorted(aliases, key=len, reverse=True)))
        # Special tokens may overlap, so each place where one begins counts.
        self._begins = re.compile(f"(?={longest_first})")
        # NOTE: a special token of one character has its mark after it.
        self._written = re.compile(f"(?:{longest_first})(?!{self._mark})")
        self._beginnings = frozenset(token[:size] for token in aliases for size in range(1, len(token)))
        self._longest = max(map(len, aliases))
        # As the template may write it: as it is, as Python shows it, as JSON in ASCII.
        shown = ascii(self._mark)[1:-1]
        in_json = "".join(rf"\u{unit:04x}" for unit in _utf16(self._mark))
        self._marks = re.compile("|".join(map(re.escape, (self._mark, shown, in_json))))

    def mark(self, request: ChatRequest) -> ChatRequest:
        """The request with marks in the special tokens of all its texts."""
        return replace(
            request,
            messages=self._marked(list(request.messages)),
            tools=self._marked(list(request.tools)),
            template_kwargs=self._marked(dict(request.template_kwargs)),
        )

    def separate(self, rendered: str) -> tuple[str, str]:
        """The prompt, and as the tokenizer takes it: with the template's special tokens by their secret names."""
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
        # The template may write another text of the client next to it, and the two may make up a special token.
        end = len(text)
        places |= {at for at in range(max(0, end - self._longest), end) if text[at:] in self._beginnings}
        if not places:
            return text
        cuts = [0, *(at + 1 for at in sorted(places)), end]
        return self._mark.join(text[start:stop] for start, stop in pairwise(cuts))


def _utf16(text: str) -> list[int]:
    units = text.encode("utf-16-be")
    return [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
