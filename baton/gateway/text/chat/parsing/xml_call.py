"""Tool calls as Qwen3-Coder and Qwen 3.5 write them: one element for each argument, whose type the schema knows.

Malformed calls are read as by the models' own parser, `qwen3coder_tool_parser.py`, as far as a stream allows.
"""

import re
from collections.abc import Callable

from baton.gateway.text.chat.parsing.argument_types import ArgumentText, ArgumentTypes, Schemas
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next, repeats
from baton.gateway.text.chat.parsing.json_rewriter import quoted

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
IN_TAG = re.compile(r"[^<>\n]")
IN_TEXT = Markers(CALL, FUNCTION)
AFTER_CALL = Markers(CALL, FUNCTION, CALL_END)
IN_FUNCTION = Markers(PARAMETER, FUNCTION_END, CALL_END, FUNCTION, CALL)
IN_VALUE = Markers(PARAMETER_END, PARAMETER, FUNCTION_END, CALL_END)
ENDS = (PARAMETER_END, FUNCTION_END, CALL_END)


def xml_calls(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

    The outer tag may be missing. An element that is not closed ends where another one begins or its parent ends, and
    text between elements is dropped.
    """

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        markers = IN_TEXT
        while marker := (yield from cursor.until(markers, out.content)):
            if marker == CALL_END:
                continue
            if marker == CALL:
                marker += yield from repeats(cursor, CALL)
            start = cursor.position
            if marker == FUNCTION:
                cursor.unread(marker)
            if (yield from _calls(cursor, out, schemas)):
                markers = AFTER_CALL
            else:
                cursor.position = start
                out.content(marker)

    return read


def _calls(cursor: Cursor, out: Collector, schemas: Schemas) -> Reading[bool]:
    """Reads calls and surplus tags around them. Returns whether one has begun."""
    begun = False
    while name := (yield from _tag(cursor, FUNCTION)):
        out.start_call(name)
        yield from _Call(cursor, out, ArgumentTypes(schemas.get(name, {}))).read()
        begun = True
        while (yield from _accept_end(cursor)):
            pass
    return begun


def _accept_end(cursor: Cursor) -> Reading[bool]:
    for end in ENDS:
        if (yield from accept_next(cursor, end)):
            return True
    return False


def _tag(cursor: Cursor, begin: str) -> Reading[str]:
    """Reads white space, `begin`, a name and `>`, and returns the name; empty: it is no such tag."""
    start = cursor.position
    if (yield from accept_next(cursor, begin)):
        name = yield from cursor.match(IN_TAG)
        if name.strip() and (yield from cursor.accept(">")):
            return name.strip()
    cursor.position = start
    return ""


class _Call:
    """Reads one call after its opening tag."""

    def __init__(self, cursor: Cursor, out: Collector, types: ArgumentTypes) -> None:
        self._cursor = cursor
        self._out = out
        self._types = types
        self._before = "{"  # what the next member has before it

    def read(self) -> Reading[None]:
        cursor = self._cursor
        ended = False
        while not ended:
            marker = yield from cursor.until(IN_FUNCTION, lambda _: None)
            if marker == PARAMETER:
                start = cursor.position
                cursor.unread(marker)
                if not (yield from self._parameter()):
                    cursor.position = start
            elif marker == FUNCTION and self._before == "{":  # the tag once more
                continue
            else:
                ended = True
                if marker != FUNCTION_END:
                    cursor.unread(marker)
        if marker or not cursor.cut:
            self._out.arguments("{}" if self._before == "{" else "}")

    def _parameter(self) -> Reading[bool]:
        """Reads one argument. Returns whether it was one."""
        cursor = self._cursor
        key = yield from _tag(cursor, PARAMETER)
        if not key:
            return False
        yield from cursor.accept("\n")
        value = _Value(f"{self._before}{quoted(key)}: ", self._types, key, self._out)
        while True:
            marker = yield from cursor.until(IN_VALUE, value.push)
            if not marker or (yield from self._ends_value(marker)):
                break
            value.push(marker)
        if marker == PARAMETER and value.is_empty and (yield from self._next_key()) == key:  # the tag once more
            return True
        value.finish(marker, cut=cursor.cut and not marker)
        self._before = ", "
        return True

    def _ends_value(self, marker: str) -> Reading[bool]:
        """Whether a marker ends the value, or is part of it. Leaves all but the value's own end to be read."""
        cursor = self._cursor
        if marker == PARAMETER_END:
            return True
        start = cursor.position
        if marker == PARAMETER:
            ends = yield from _rest_of_tag(cursor)
        else:  # a value may be a text about calls: an end is one that nothing follows in its line
            ends = (yield from cursor.peek()) == "\n" or (yield from _begins_or_ends(cursor))
        cursor.position = start
        if ends:
            cursor.unread(marker)
        return ends

    def _next_key(self) -> Reading[str]:
        start = self._cursor.position
        key = yield from _tag(self._cursor, PARAMETER)
        self._cursor.position = start
        return key


def _rest_of_tag(cursor: Cursor) -> Reading[bool]:
    name = yield from cursor.match(IN_TAG)
    return bool(name.strip()) and (yield from cursor.accept(">"))


def _begins_or_ends(cursor: Cursor) -> Reading[bool]:
    """Whether the text ends, or the next call's or this one's tag comes."""
    yield from cursor.skip_space()
    tags = (FUNCTION_END, CALL_END, CALL, FUNCTION)
    return not (yield from cursor.peek()) or bool((yield from cursor.accept_one(tags)))


class _Value:
    """Writes one member. Line breaks at the value's end may be the markup's."""

    def __init__(self, lead: str, types: ArgumentTypes, key: str, out: Collector) -> None:
        self._lead = lead
        self._text = ArgumentText(types.of(key))
        self._out = out
        self._breaks = ""  # the last two line breaks, if nothing follows them
        self.is_empty = True

    def push(self, piece: str) -> None:
        piece = self._breaks + piece
        text = piece.removesuffix("\n").removesuffix("\n")
        self._breaks = piece[len(text) :]
        self.is_empty = self.is_empty and not text
        self._write(self._text.push(text) if text else "")

    def finish(self, marker: str, *, cut: bool) -> None:
        """`marker`: what ended the value. The tag that is missing had a line break after it, too."""
        markups = 1 if marker in (PARAMETER_END, PARAMETER) else 2
        if kept := self._breaks[markups:]:
            self._write(self._text.push(kept))
        self._write(self._text.held() if cut else self._text.finish(), always=True)

    def _write(self, json: str, *, always: bool = False) -> None:
        if json or always:
            self._out.arguments(self._lead + json)
            self._lead = ""
