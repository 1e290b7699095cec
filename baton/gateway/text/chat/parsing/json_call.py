"""Reads tool calls that are JSON objects, and JSON values within other markup."""

import json
import re
from collections.abc import Callable

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import SPACE, Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_rewriter import JsonRewriter, well_formed
from baton.gateway.text.chat.parsing.lenient_json import rewritten

ARGUMENTS = ("arguments", "parameters")
IN_STRING = re.compile(r'[^"\\]*')
SCALAR = re.compile(r"[-+.\w]", re.ASCII)


def json_value(
    cursor: Cursor, write: Callable[[str], None], *, ends: Markers | None = None, forget: bool = False
) -> Reading[bool]:
    """Reads one object or array, and writes it as it comes, as valid JSON.

    Args:
        ends: texts that end a broken value. They stay to be read.
        forget: whether the cursor may drop the text, because nobody will set it back.

    Returns:
        Whether the last bracket came. Otherwise the value was closed here, unless the text was cut off.
    """
    return (yield from rewrite(cursor, JsonRewriter(ends), write, forget=forget))


def rewrite(
    cursor: Cursor, rewriter: JsonRewriter, write: Callable[[str], None], *, forget: bool = True
) -> Reading[bool]:
    """Does what `json_value` does, with a rewriter of the caller."""
    while True:
        cursor.position = rewriter.read(cursor.text, cursor.position, last=cursor.ended)
        if rewriter.finished or cursor.ended:
            break
        if taken := rewriter.take():
            write(taken)
        if forget:
            cursor.forget()
        yield
    if not rewriter.finished and cursor.cut:
        write(rewriter.take() + rewriter.held())
        return False
    rewriter.complete()
    write(rewriter.take())
    return rewriter.closed


def end_of_call(cursor: Cursor, *literals: str) -> Reading[None]:
    """Reads surplus braces, then each literal that comes next, in order, with white space before each."""
    while (yield from accept_next(cursor, "}")):
        pass
    for literal in literals:
        yield from accept_next(cursor, literal)


def accept_next(cursor: Cursor, literal: str) -> Reading[bool]:
    """Reads white space and `literal`, or nothing if something else comes. Returns whether it read."""
    start = cursor.position
    yield from cursor.skip_space()
    if (yield from cursor.accept(literal)):
        return True
    cursor.position = start
    return False


def repeats(cursor: Cursor, marker: str) -> Reading[str]:
    """Reads the marker as often as it is repeated, with white space before each, and returns what it read.

    If no call follows the last marker, none follows the others. To try each in turn would take quadratic time.
    """
    start = cursor.position
    while (yield from accept_next(cursor, marker)):
        pass
    return cursor.text[start : cursor.position]


def json_string(cursor: Cursor) -> Reading[str | None]:
    """Reads a string and returns its value; None: what comes is not a string."""
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
    return well_formed(str(value))


class CallObject:
    """Reads `{"name": ..., "arguments": {...}}`, or `parameters`, with its keys in any order, and other keys.

    Args:
        known: names that calls may have; None: any name.
        bare: calls have no marker, so an object without arguments is not a call.
        ends: texts that end a broken call. They stay to be read.

    Attributes:
        begun: the object is a call, and its beginning was passed on.
    """

    def __init__(
        self,
        cursor: Cursor,
        out: Collector,
        known: frozenset[str] | None,
        *,
        bare: bool,
        ends: Markers | None = None,
    ) -> None:
        self._cursor = cursor
        self._out = out
        self._known = known
        self._bare = bare
        self._ends = ends
        self._name = ""
        self._early = ""  # arguments that came before the name
        self.begun = False

    def read(self) -> Reading[bool]:
        """Reads the object. Returns whether it ended well. Otherwise, if it has not `begun`, it is not a call."""
        cursor = self._cursor
        if not (yield from cursor.accept("{")):
            return False
        while True:
            yield from cursor.skip_space()
            ended = yield from self._member()
            if self.begun:
                return ended and (yield from rewrite(cursor, JsonRewriter(self._ends, inside=True), lambda _: None))
            if not ended:
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
            return self._whole(rewritten(text.lstrip(SPACE)))
        if character == "n":
            return (yield from cursor.accept("null")) and self._whole("{}")
        if character != "{":
            return False
        if self._name:
            self._begin("")
            return (yield from json_value(cursor, self._out.arguments, ends=self._ends, forget=True))
        pieces: list[str] = []
        ended = yield from json_value(cursor, pieces.append, ends=self._ends)
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
    return bool((yield from cursor.match(SCALAR)))
