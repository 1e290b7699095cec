"""Rewrites JSON as models write it to JSON by RFC 8259, while it comes. Nothing else repairs JSON."""

import json
import math
import re

from baton.gateway.text.chat.parsing.cursor import SPACE, Markers

DEPTH_MAX = 100  # deeper values become null: requests, which send arguments back, may have 128 levels
NUMBER_CHARS_MAX = 512
LITERALS = {
    "true": "true", "false": "false", "null": "null", "none": "null", "undefined": "null",
    "nan": "null", "infinity": "null", "-infinity": "null", "inf": "null", "-inf": "null",
}  # fmt: skip
JSON_LITERALS = ("true", "false", "null")
CLOSES = {"{": "}", "[": "]"}
QUOTES = "\"'"
REPLACEMENT = "\ufffd"

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
NUMBER_LIKE = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
INTEGER = re.compile(r"[-+]?[0-9]+")
SURROGATE = re.compile("[\ud800-\udfff]")
SPACES = re.compile(f"[{SPACE}]+")
IN_STRING = {quote: re.compile(rf"[^{quote}\"\\\x00-\x1f\ud800-\udfff]+") for quote in QUOTES}
IN_VALUE = re.compile(r'[^,{}\[\]"\r\n]*')  # without quotes
IN_KEY = re.compile(r"[^,{}\[\]\"'\r\n:]*")
# A whole escape; half of a surrogate pair; the beginning of an escape that more text may complete.
ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})'
)
HALF = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
ESCAPE_BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)


def well_formed(text: str) -> str:
    """Returns the text with U+FFFD in place of halves of surrogate pairs, which UTF-8 cannot encode."""
    return text if text.isascii() else SURROGATE.sub(REPLACEMENT, text)


def quoted(text: str) -> str:
    """Returns the text as a JSON string."""
    return json.dumps(well_formed(text), ensure_ascii=False)


def number(text: str) -> str | None:
    """Returns a finite number as JSON, also from `+1`, `.5`, `1.` and `007`; None: the text is no such number."""
    if len(text) > NUMBER_CHARS_MAX:
        return None
    if not NUMBER_LIKE.fullmatch(text) or not math.isfinite(value := float(text)):
        return None
    if NUMBER.fullmatch(text):
        return text
    return str(int(text)) if INTEGER.fullmatch(text) else repr(value)


def scalar(text: str) -> str:
    """Returns text without quotes as JSON: a number, a literal, or else a string. An infinite number becomes null."""
    found = LITERALS.get(text.lower()) or number(text)
    if found is None:
        return "null" if NUMBER.fullmatch(text) else quoted(text)
    return found


def cut_scalar(text: str) -> str:
    """Does what `scalar` does, for text whose end may be missing."""
    literal = next((literal for literal in JSON_LITERALS if literal.startswith(text)), None)
    return literal or number(text.rstrip("+-.eE")) or scalar(text)


def scalar_so_far(text: str) -> str:
    if any(literal.startswith(text) for literal in JSON_LITERALS):
        return text
    return scalar(text.rstrip(SPACE)).removesuffix('"')


class JsonRewriter:
    """Rewrites one object or array. Valid JSON is unchanged, except that infinite numbers become null.

    It repairs raw control characters and wrong escapes in strings, single quotes, quotes within strings, missing and
    surplus commas, Python's literals, and missing quotes, keys, values and brackets. Its output so far is always the
    beginning of valid JSON, and does not depend on how the text was cut.

    Args:
        ends: texts that end the value outside of strings.
        inside: the text begins within an object, after a member.

    Attributes:
        finished: no more text belongs to the value.
        closed: the value's last bracket came.
    """

    def __init__(self, ends: Markers | None = None, *, inside: bool = False) -> None:
        self.finished = False
        self.closed = False
        self._ends = ends or Markers()
        self._out: list[str] = []
        self._closers = ["}"] if inside else []
        self._wants = "comma" if inside else "value"  # or "key", "colon"
        self._comma: list[str] = []  # and the space after it: written once something follows
        self._quote = ""  # of the string that the text is in
        self._after_quote: list[str] | None = None  # space after a quote that may have ended the string
        self._unquoted: list[str] = []  # pieces of a number, literal, or string without quotes
        self._mended_quote = False

    def take(self) -> str:
        """Returns the JSON that was written since the last call."""
        taken = "".join(self._out)
        self._out.clear()
        return taken

    def read(self, text: str, position: int, *, last: bool = False) -> int:
        """Reads on. Returns the position of the value's end, or of text that cannot be read without more text.

        Args:
            last: no more text comes.
        """
        while position < len(text) and not self.finished:
            reached = self._step(text, position, last=last)
            if reached is None:
                break
            position = reached
        return position

    def held(self) -> str:
        """Returns JSON for text that was read but not written yet, as far as more text cannot change it."""
        text = "".join(self._unquoted)
        if text:
            text = quoted(text)[:-1] if self._wants == "key" else scalar_so_far(text)
        return "".join(self._comma) + text + ('"' if self._after_quote is not None else "")

    def complete(self) -> None:
        """Closes all open strings, objects and arrays."""
        if self._quote:
            self._end_string()
        if self._unquoted:
            self._end_unquoted(cut=True)
        while self._closers:
            self._close()
        self.finished = True

    def _step(self, text: str, position: int, *, last: bool) -> int | None:
        in_string = bool(self._quote) and self._after_quote is None
        if (not in_string or self._mended_quote) and text[position] in self._ends.firsts:
            if self._ends.pattern.match(text, position):
                self.complete()
                return position
            if not last and self._ends.held(text, position) == position:
                return None
        if in_string:
            return self._string(text, position, last=last)
        if self._after_quote is not None:
            return self._quote_or_end(text, position, self._after_quote)
        if self._unquoted:
            return self._unquoted_text(text, position)
        return self._between(text, position)

    def _string(self, text: str, position: int, *, last: bool) -> int | None:
        run = IN_STRING[self._quote].match(text, position)
        if run:
            end = self._before_marker(text, position, run.end()) if self._mended_quote else run.end()
            self._out.append(text[position:end])
            return end
        character = text[position]
        if character == self._quote:
            self._after_quote = []
        elif character == "\\":
            return self._escape(text, position, last=last)
        else:
            self._out.append(quoted(character)[1:-1])
        return position + 1

    def _escape(self, text: str, position: int, *, last: bool) -> int | None:
        whole = ESCAPE.match(text, position)
        if whole:
            self._out.append(whole.group())
            return whole.end()
        if not last and ESCAPE_BEGUN.match(text, position):
            return None
        half = HALF.match(text, position)
        if half:
            self._out.append(REPLACEMENT)
            return half.end()
        if text.startswith("'", position + 1):
            self._out.append("'")
            return position + 2
        self._out.append("\\\\" if position + 1 < len(text) else "")
        return position + 1

    def _quote_or_end(self, text: str, position: int, space: list[str]) -> int:
        """Decides by the next character whether a quote ended its string."""
        spaces = SPACES.match(text, position)
        if spaces:
            space.append(spaces.group())
            return spaces.end()
        after = ":,}" if self._wants == "key" else ",}]"
        if text[position] in after or text[position] == self._quote:
            self._end_string()
        else:
            self._out.append(quoted(self._quote + "".join(space))[1:-1])
            self._after_quote = None
            self._mended_quote = True
        return position

    def _end_string(self) -> None:
        self._out += ['"', *(self._after_quote or ())]
        self._quote, self._after_quote = "", None
        self._wants = "colon" if self._wants == "key" else "comma"

    def _unquoted_text(self, text: str, position: int) -> int:
        run = (IN_KEY if self._wants == "key" else IN_VALUE).match(text, position)
        end = self._before_marker(text, position, run.end() if run else position)
        if end == position:
            self._end_unquoted()
        else:
            self._unquoted.append(text[position:end])
        return end

    def _end_unquoted(self, *, cut: bool = False) -> None:
        text = "".join(self._unquoted)
        self._unquoted.clear()
        value = text.rstrip(SPACE)
        key = self._wants == "key"
        read = quoted if key else cut_scalar if cut else scalar
        self._out += [read(value), text[len(value) :]]
        self._wants = "colon" if key else "comma"

    def _before_marker(self, text: str, position: int, end: int) -> int:
        """Returns `end`, or the position before it where a marker may begin."""
        found = self._ends.pattern.search(text, position, end + self._ends.chars_max)
        return min(end, found.start() if found else max(position + 1, self._ends.held(text, position)))

    def _between(self, text: str, position: int) -> int:
        spaces = SPACES.match(text, position)
        if spaces:
            (self._comma or self._out).append(spaces.group())
            return spaces.end()
        character = text[position]
        if character in CLOSES:
            self._open(character)
        elif character in self._closers:
            while self._close() != character:
                pass
            self.finished = self.closed = not self._closers
        elif character == "," and self._closers:
            self._end_member()
        elif character == ":" and self._wants == "colon":
            self._out.append(":")
            self._wants = "value"
        elif character in QUOTES and self._closers:
            self._begin()
            self._out.append('"')
            self._quote = character
        elif character not in "}]:," and self._closers and self._wants != "comma":
            self._begin()
            self._unquoted.append(character)
        return position + 1

    def _begin(self) -> None:
        """Writes the comma or colon before the next key or value."""
        if self._wants == "comma":
            self._comma, self._wants = [","], self._next()
        elif self._wants == "colon":
            self._out.append(": ")
            self._wants = "value"
        self._out += self._comma
        self._comma.clear()

    def _next(self) -> str:
        """Returns what comes first in a member of the innermost object or array."""
        return "key" if self._closers[-1] == "}" else "value"

    def _open(self, bracket: str) -> None:
        if self._closers and (self._wants == "key" or (self._wants == "comma" and self._next() == "key")):
            return  # an object's key is not an object
        self._begin()
        if len(self._closers) == DEPTH_MAX:
            self._out.append("null")
            self._wants = "comma"
            self.complete()
            return
        self._out.append(bracket)
        self._closers.append(CLOSES[bracket])
        self._wants = self._next()

    def _end_member(self) -> None:
        self._end_value()
        if self._wants == "comma":
            self._comma, self._wants = [","], self._next()

    def _end_value(self) -> None:
        """Writes null for a key without a value."""
        if self._wants == "colon":
            self._out.append(": null")
        elif self._wants == "value" and self._closers[-1] == "}":
            self._out.append("null")
        else:
            return
        self._wants = "comma"

    def _close(self) -> str:
        """Closes the innermost object or array, and returns its bracket."""
        self._end_value()
        self._out += self._comma[1:]
        self._comma.clear()
        self._out.append(closer := self._closers.pop())
        self._wants = "comma"
        return closer
