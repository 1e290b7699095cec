"""A custom tool, whose input is a text, as the function with one text that the model sees. Pure.

The model writes `{"input": "..."}`, and `CustomInput` reads the text out of it, piece by piece.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from baton.core.types import Grammar, GrammarKind

ARGUMENT = "input"  # the only argument of a custom tool as the model sees it
GRAMMAR_KINDS: Mapping[str, GrammarKind] = MappingProxyType({"lark": GrammarKind.LARK, "regex": GrammarKind.REGEX})
_LANGUAGES = {GrammarKind.LARK: "Lark grammar", GrammarKind.REGEX: "regular expression"}

# It is bounded, so that a text that begins differently is known after a few characters.
_OPENING = re.compile(r'\s{0,16}\{\s{0,16}"input"\s{0,16}:\s{0,16}"')
_OPENING_MAX = 80  # characters; more than any opening has
_PLAIN = re.compile(r'[^"\\]*')
_SIMPLE = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_REPLACEMENT = "\ufffd"


class CustomInput:
    """The text of one call. Pieces of the JSON go in, and pieces of the text come out as early as possible."""

    def __init__(self) -> None:
        self._json: list[str] = []
        self._pending = ""  # JSON that is not decoded yet
        self._opened = self._closed = False
        self._given: list[str] = []

    def push(self, piece: str) -> str:
        """Takes a piece of JSON, and returns the text that it completes; may be empty."""
        self._json.append(piece)
        if self._closed:
            return ""
        self._pending += piece
        if not self._opened:
            opening = _OPENING.match(self._pending)
            if opening is None:
                self._closed = len(self._pending) > _OPENING_MAX  # then `finish` reads all of it
                return ""
            self._opened = True
            self._pending = self._pending[opening.end() :]
        text = self._decode()
        self._given.append(text)
        return text

    def finish(self) -> str:
        """Ends the JSON, and returns the rest of the text.

        If the model wrote other arguments, their only text is taken, and otherwise the JSON itself.
        """
        if self._opened:
            return ""
        text = _other_text("".join(self._json))
        self._given.append(text)
        return text

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        return "".join(self._given)

    def _decode(self) -> str:
        """Decodes what is complete: everything but a last escape whose end may follow."""
        raw, place, out = self._pending, 0, []
        while True:
            plain = _PLAIN.match(raw, place)
            assert plain is not None
            out.append(plain[0])
            place = plain.end()
            if place == len(raw):
                break
            if raw[place] == '"':
                self._closed = True
                break
            found = _escape(raw, place)
            if found is None:
                break
            text, place = found
            out.append(text)
        self._pending = raw[place:]
        return "".join(out)


def _escape(raw: str, place: int) -> tuple[str, int] | None:
    """Decodes the escape at this place. Returns its text and its end, or None if its end may be missing."""
    kind = raw[place + 1 : place + 2]
    if not kind:
        return None
    if kind != "u":
        return _SIMPLE.get(kind, kind), place + 2
    first = _unit(raw, place)
    if first is None:
        return None
    if not 0xD800 <= first < 0xDC00:
        return (_REPLACEMENT if 0xDC00 <= first < 0xE000 else chr(first)), place + 6
    rest = raw[place + 6 : place + 8]
    if rest != "\\u":
        return (_REPLACEMENT, place + 6) if not "\\u".startswith(rest) else None
    second = _unit(raw, place + 6)
    if second is None:
        return None
    if not 0xDC00 <= second < 0xE000:
        return _REPLACEMENT, place + 6
    return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)), place + 12


def _unit(raw: str, place: int) -> int | None:
    r"""The number of the escape \uXXXX at this place; None if its end is missing."""
    digits = raw[place + 2 : place + 6]
    if len(digits) < 4:
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return 0xDC00  # no number, so it becomes the replacement character


def _other_text(written: str) -> str:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    if isinstance(value, dict):
        texts = [each for each in value.values() if isinstance(each, str)]
        given = value.get(ARGUMENT)
        if isinstance(given, str):
            return _whole(given)
        if len(texts) == 1:
            return _whole(texts[0])
    return written


def _whole(text: str) -> str:
    """Replaces halves of characters, which JSON can express and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_function(name: str, description: str | None, grammar: Grammar | None) -> dict[str, Any]:
    """Returns the function that the model sees in place of a custom tool; `grammar` is the language of its input."""
    argument = {"type": "string", "description": "the tool's input, as plain text"}
    if grammar is not None:
        argument["description"] = f"the tool's input, which matches this {_LANGUAGES[grammar.kind]}:\n{grammar.text}"
    function = {"name": name} if description is None else {"name": name, "description": description}
    schema = {"type": "object", "properties": {ARGUMENT: argument}, "required": [ARGUMENT]}
    return {**function, "parameters": {**schema, "additionalProperties": False}}


def whole_text(arguments: str) -> str:
    """Returns the text of a call whose JSON is complete, or was cut off."""
    read = CustomInput()
    read.push(arguments)
    read.finish()
    return read.text


def as_arguments(text: str) -> str:
    """Returns the JSON of a call with this text, as the model would have written it."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)
