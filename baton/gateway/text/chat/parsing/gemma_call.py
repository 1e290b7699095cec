"""Reads the calls of FunctionGemma and Gemma 4: `call:NAME{key:<escape>text<escape>,other:3}` between markers.

Their arguments are like JSON, with keys without quotes and a mark around strings. The tools' schemas give the values
their types.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from baton.gateway.text.chat.parsing.argument_types import ANY, TEXT, Alternative, ArgumentType, ArgumentTypes, Schemas
from baton.gateway.text.chat.parsing.call_list import between_markers
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next, end_of_call, json_string
from baton.gateway.text.chat.parsing.json_rewriter import quoted
from baton.gateway.text.chat.parsing.members import Members, MemberValue

NAME = re.compile(r"[\w.\-]")
IN_KEY = re.compile(r"[^:,{}<>\n]")


@dataclass(frozen=True)
class GemmaMarkup:
    """The marks of a format: around a call, and around a string."""

    call: str
    call_end: str
    string: str

    @cached_property
    def in_string(self) -> Markers:
        return Markers(self.string, self.call_end, self.call)

    @cached_property
    def in_value(self) -> Markers:
        return Markers(self.string, self.call_end, self.call, '"', "{", "[", "}", "]", ",")

    @cached_property
    def in_quotes(self) -> Markers:
        return Markers('"', "\\", self.call_end, self.call)

    @cached_property
    def between_members(self) -> Markers:
        return Markers(self.call_end, self.call, "}")

    @property
    def tags(self) -> tuple[str, ...]:
        """Everything that the reader looks for."""
        return self.call, self.call_end, self.string


FUNCTION_GEMMA = GemmaMarkup("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaMarkup("<|tool_call>", "<tool_call|>", '<|"|>')


def gemma_calls(schemas: Schemas, markup: GemmaMarkup) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls. A string or object that is not closed ends at the call's end."""

    def read_call(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        if not (yield from cursor.accept("call:")):
            return False
        name = yield from cursor.match(NAME)
        if not name or not (yield from accept_next(cursor, "{")):
            return False
        out.start_call(name)
        yield from _Arguments(cursor, out, ArgumentTypes(schemas.get(name, {})), markup).read()
        return True

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        yield from between_markers(cursor, out, Markers(markup.call), read_call, repeated=True)

    return read


class _Arguments:
    """Reads the arguments of one call after their opening brace, and the call's end."""

    def __init__(self, cursor: Cursor, out: Collector, types: ArgumentTypes, markup: GemmaMarkup) -> None:
        self._cursor = cursor
        self._types = types
        self._markup = markup
        self._members = Members(out)

    def read(self) -> Reading[None]:
        cursor, markup = self._cursor, self._markup
        while (yield from self._member()):
            yield from cursor.skip_space()
            yield from cursor.accept(",")
            cursor.forget()
        marker = yield from cursor.until(markup.between_members, _drop)
        if marker or not cursor.cut:
            self._members.close()
        if marker == "}":
            yield from end_of_call(cursor, markup.call_end)
        elif marker == markup.call:
            cursor.unread(marker)

    def _member(self) -> Reading[bool]:
        """Reads one argument. Returns whether it was one."""
        cursor, markup = self._cursor, self._markup
        start = cursor.position
        yield from cursor.skip_space()
        marked = yield from cursor.accept(markup.string)
        key = yield from cursor.match(IN_KEY)
        if marked:
            yield from cursor.accept(markup.string)
        key = key.strip().strip('"')
        if not key or not (yield from accept_next(cursor, ":")):
            cursor.position = start
            return False
        yield from cursor.skip_space()
        if (yield from cursor.accept(markup.string)):
            value = self._members.value(key, self._type(key, TEXT))
            marker = yield from cursor.until(markup.in_string, value.push)
            if marker != markup.string:
                cursor.unread(marker)
        elif (text := (yield from self._json_string())) is not None:
            value = self._members.value(key, self._type(key, TEXT))
            value.push(text)
            marker = text or '""'
        else:
            value = self._members.value(key, self._type(key, ANY))
            marker = yield from self._plain_value(value)
        value.finish(breaks=0, cut=cursor.cut and not marker)
        return bool(marker)

    def _type(self, key: str, otherwise: Alternative) -> ArgumentType:
        """Returns an argument's type. A string is one even if its text looks like another type that is allowed."""
        type = self._types.of(key, otherwise)
        return ArgumentType() if otherwise == TEXT and type.is_text else type

    def _json_string(self) -> Reading[str | None]:
        """Reads a string in JSON's quotes; None, and nothing is read, if there is none."""
        start = self._cursor.position
        text = yield from json_string(self._cursor)
        self._cursor.position = start if text is None else self._cursor.position
        return text

    def _plain_value(self, value: MemberValue) -> Reading[str]:
        """Passes a number, word, object or array on as JSON. Returns the mark after it, which stays to be read."""
        cursor, markup = self._cursor, self._markup
        depth = 0
        while marker := (yield from cursor.until(markup.in_value, value.push)):
            if marker in (markup.call_end, markup.call) or (depth == 0 and marker in "},]"):
                cursor.unread(marker)
                break
            if marker == markup.string:
                yield from self._string(value)
                continue
            value.push(marker)
            if marker == '"':
                yield from self._quoted(value)
            depth += (marker in "{[") - (marker in "}]")
        return marker

    def _string(self, value: MemberValue) -> Reading[None]:
        """Passes a string within an object or array on as JSON."""
        value.push('"')
        marker = yield from self._cursor.until(self._markup.in_string, lambda piece: value.push(quoted(piece)[1:-1]))
        if marker != self._markup.string:
            self._cursor.unread(marker)
        if marker or not self._cursor.cut:
            value.push('"')

    def _quoted(self, value: MemberValue) -> Reading[None]:
        """Passes the rest of a JSON string on."""
        cursor, markup = self._cursor, self._markup
        while marker := (yield from cursor.until(markup.in_quotes, value.push)):
            if marker in (markup.call_end, markup.call):
                cursor.unread(marker)
                return
            value.push(marker)
            if marker == '"':
                return
            if (yield from cursor.have(1)):  # the escaped character
                value.push(cursor.text[cursor.position])
                cursor.position += 1


def _drop(_: str) -> None:
    """Drops text between members."""
