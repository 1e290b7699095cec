"""Tool calls that are JSON objects, and their arguments."""

import json
import re
from collections.abc import Callable

from gateway.chat.parsing.collector import Collector
from gateway.chat.parsing.cursor import SPACE, Cursor, Reading

ARGUMENTS = ("arguments", "parameters")
IN_STRING = re.compile(r'[^"\\]*')
# Runs of characters that begin or end nothing: numbers, literals, separators, white space.
BETWEEN = re.compile(r"[-+.,:\w \t\r\n]*", re.ASCII)
CLOSES = {"}": "{", "]": "["}
DEPTH_MAX = 512


def json_value(cursor: Cursor, write: Callable[[str], None], *, forget: bool = False) -> Reading[bool]:
    """Passes one object or array on as it comes. Only its brackets and strings are checked.

    Args:
        forget: nobody will set the cursor back.

    Returns:
        Whether it ended well. If not, the cursor is at the character that is wrong, or at the text's end.
    """
    open_brackets: list[str] = []
    in_string = False
    start = cursor.position
    while True:
        if open_brackets:
            found = (IN_STRING if in_string else BETWEEN).match(cursor.text, cursor.position)
            cursor.position = found.end() if found else cursor.position
        if cursor.position == len(cursor.text):
            if start < cursor.position:
                write(cursor.text[start : cursor.position])
            if cursor.ended:
                return False
            if forget:
                cursor.forget()
            start = cursor.position
            yield
            continue
        character = cursor.text[cursor.position]
        if in_string and character == "\\":
            # An escape may be cut in two, so it is read whole.
            write(cursor.text[start : cursor.position])
            start = cursor.position
            if not (yield from cursor.have(2)):
                cursor.position = len(cursor.text)
                write(cursor.text[start:])
                return False
            cursor.position += 2
            continue
        if character == '"' and open_brackets:
            in_string = not in_string
        elif character in "{[" and len(open_brackets) < DEPTH_MAX:
            open_brackets.append(character)
        elif not open_brackets or CLOSES.get(character) != open_brackets.pop():
            write(cursor.text[start : cursor.position])
            return False
        cursor.position += 1
        if not open_brackets:
            write(cursor.text[start : cursor.position])
            return True


def json_string(cursor: Cursor) -> Reading[str | None]:
    """Reads a string and returns its value; None: no string."""
    start = cursor.position
    if not (yield from cursor.accept('"')):
        return None
    while True:
        found = IN_STRING.match(cursor.text, cursor.position)
        cursor.position = found.end() if found else cursor.position
        if not (yield from cursor.have(1)):
            return None
        character = cursor.text[cursor.position]
        if character == '"':
            cursor.position += 1
            break
        if character == "\\" and not (yield from cursor.have(2)):
            return None
        cursor.position += 2 if character == "\\" else 0
    try:
        value = json.loads(cursor.text[start : cursor.position], strict=False)
    except ValueError:
        return None
    return str(value)


def json_scalar(cursor: Cursor) -> Reading[str]:
    """Reads a number or literal."""
    return (yield from cursor.match(re.compile(r"[-+.\w]", re.ASCII)))


class CallObject:
    """Reads `{"name": ..., "arguments": {...}}`, or with `parameters`, in any order and with other keys.

    Args:
        known: names of calls; None: any.
        bare: without a marker in front, only an object with arguments is a call.
    """

    def __init__(self, cursor: Cursor, out: Collector, known: frozenset[str] | None, *, bare: bool) -> None:
        self._cursor = cursor
        self._out = out
        self._known = known
        self._bare = bare
        self._name = ""
        self._early = ""  # arguments that came before the name
        self.begun = False

    def read(self) -> Reading[bool]:
        """Returns whether the object ended well. If not, and the call has not `begun`, it is no call."""
        cursor = self._cursor
        if not (yield from cursor.accept("{")):
            return False
        while True:
            yield from cursor.skip_space()
            if not (yield from self._member()):
                return False
            yield from cursor.skip_space()
            if (yield from cursor.accept(",")):
                continue
            if not (yield from cursor.accept("}")):
                return False
            return self._end()

    def _member(self) -> Reading[bool]:
        cursor = self._cursor
        key = yield from json_string(cursor)
        if key is None:
            return False
        yield from cursor.skip_space()
        if not (yield from cursor.accept(":")):
            return False
        yield from cursor.skip_space()
        if key == "name" and not self._name:
            return (yield from self._read_name())
        if key in ARGUMENTS and not self.begun and not self._early:
            return (yield from self._read_arguments())
        return (yield from _skip(cursor))

    def _read_name(self) -> Reading[bool]:
        name = yield from json_string(self._cursor)
        if not name or (self._known is not None and name not in self._known):
            return False
        self._name = name
        if self._early:
            self._begin(self._early)
        return True

    def _read_arguments(self) -> Reading[bool]:
        cursor = self._cursor
        character = yield from cursor.peek()
        if character == '"':  # JSON in a string
            text = yield from json_string(cursor)
            if text is None or not text.lstrip(SPACE).startswith("{"):
                return False
            return self._whole(text)
        if character == "n":
            return (yield from cursor.accept("null")) and self._whole("{}")
        if character != "{":
            return False
        if self._name:
            self._begin("")
            return (yield from json_value(cursor, self._out.arguments, forget=True))
        pieces: list[str] = []
        ended = yield from json_value(cursor, pieces.append)
        self._early = "".join(pieces)
        return ended

    def _whole(self, text: str) -> bool:
        if self._name:
            self._begin(text)
        else:
            self._early = text
        return True

    def _begin(self, text: str) -> None:
        self.begun = True
        self._out.start_call(self._name)
        self._out.arguments(text)

    def _end(self) -> bool:
        if self.begun:
            return True
        if not self._name or self._bare:
            return False
        self._begin("{}")
        return True


def _skip(cursor: Cursor) -> Reading[bool]:
    character = yield from cursor.peek()
    if character == '"':
        return (yield from json_string(cursor)) is not None
    if character and character in "{[":
        return (yield from json_value(cursor, lambda _: None))
    return bool((yield from json_scalar(cursor)))
