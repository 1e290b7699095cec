"""Reads calls whose arguments are pairs of a key's and a value's element: of GLM 4.5 and later, Hunyuan and LongCat.

The tools' schemas give the values their types. Values keep all of their text, as in the models' own templates.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from baton.gateway.text.chat.parsing.argument_types import ArgumentTypes, Schemas
from baton.gateway.text.chat.parsing.call_list import between_markers
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next
from baton.gateway.text.chat.parsing.members import Members
from baton.gateway.text.chat.parsing.tagged_json import json_in_tag

NAME = re.compile(r"[\w.\-]")
IN_KEY = re.compile(r"[^<>\n]")


@dataclass(frozen=True)
class PairMarkup:
    """The tags of a format, without angle brackets.

    Attributes:
        call: the tag around one call, which begins with the function's name.
        key, value: the tags around an argument's name and value.
        section: the tag around all calls; empty: there is none. Models may leave it out.
        separator: the tag after the function's name; empty: there is none.
    """

    call: str
    key: str
    value: str
    section: str = ""
    separator: str = ""

    @cached_property
    def opens(self) -> Markers:
        return Markers(*(f"<{tag}>" for tag in (self.section, self.call) if tag))

    @cached_property
    def call_tags(self) -> Markers:
        return Markers(f"<{self.call}>", self.call_end, self.section_end)

    @cached_property
    def in_call(self) -> Markers:
        return Markers(f"<{self.key}>", f"<{self.call}>", self.call_end, self.section_end)

    @cached_property
    def after_key(self) -> Markers:
        return Markers(f"</{self.key}>", f"<{self.value}>", f"<{self.key}>", self.call_end, self.section_end)

    @cached_property
    def in_value(self) -> Markers:
        return Markers(f"</{self.value}>", f"<{self.key}>", self.call_end)

    @property
    def call_end(self) -> str:
        return f"</{self.call}>"

    @property
    def section_end(self) -> str:
        return f"</{self.section}>" if self.section else ""

    @property
    def tags(self) -> tuple[str, ...]:
        """Everything that the reader looks for."""
        names = filter(None, (self.section, self.call, self.separator, self.key, self.value))
        return tuple(tag for name in names for tag in (f"<{name}>", f"</{name}>"))


GLM = PairMarkup("tool_call", "arg_key", "arg_value")
HUNYUAN = PairMarkup("tool_call", "arg_key", "arg_value", section="tool_calls", separator="tool_sep")
LONGCAT = PairMarkup("longcat_tool_call", "longcat_arg_key", "longcat_arg_value")


def pair_calls(schemas: Schemas, markup: PairMarkup) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls such as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>`.

    A key or value that is not closed ends where the next element begins or the call ends. Text between elements is
    dropped. A call may also be JSON, which some of the models write now and then.
    """

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = False
        while True:
            start = cursor.position
            yield from accept_next(cursor, f"<{markup.call}>")
            if not (yield from _call(cursor, out, schemas, markup)):
                cursor.position = start
                break
            begun = True
            start = cursor.position
            yield from cursor.skip_space()
            again = yield from cursor.accept(f"<{markup.call}>")
            cursor.position = start
            if not again:
                break
        if begun and markup.section:
            yield from accept_next(cursor, markup.section_end)
        return begun

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        yield from between_markers(cursor, out, markup.opens, read_calls, repeated=True)

    return read


def _call(cursor: Cursor, out: Collector, schemas: Schemas, markup: PairMarkup) -> Reading[bool]:
    """Reads a call after its opening tag. Returns whether it is one."""
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        return (yield from json_in_tag(cursor, out, markup.call_end, markup.call_tags))
    name = yield from cursor.match(NAME)
    if not name or not (yield from _ends_name(cursor, markup)):
        return False
    out.start_call(name)
    members, types = Members(out), ArgumentTypes(schemas.get(name, {}))
    while (marker := (yield from cursor.until(markup.in_call, _drop))) == f"<{markup.key}>":
        yield from _pair(cursor, members, types, markup)
    if marker or not cursor.cut:
        members.close()
    if marker != markup.call_end:
        cursor.unread(marker)
    return True


def _ends_name(cursor: Cursor, markup: PairMarkup) -> Reading[bool]:
    """Whether a name is followed by a tag of a call. Such a tag stays to be read, except the separator."""
    yield from cursor.skip_space()
    if markup.separator and (yield from cursor.accept(f"<{markup.separator}>")):
        return True
    start = cursor.position
    ends = bool((yield from cursor.accept_one((f"<{markup.key}>", markup.call_end))))
    cursor.position = start
    return ends


def _pair(cursor: Cursor, members: Members, types: ArgumentTypes, markup: PairMarkup) -> Reading[None]:
    """Reads one argument after the opening tag of its key. A key without a value is left out."""
    pieces: list[str] = []
    marker = yield from cursor.until(markup.after_key, pieces.append)
    if marker == f"</{markup.key}>":
        marker = f"<{markup.value}>" if (yield from accept_next(cursor, f"<{markup.value}>")) else ""
    elif marker != f"<{markup.value}>":
        cursor.unread(marker)
    key = "".join(pieces).strip()
    if marker != f"<{markup.value}>" or not key:
        return
    value = members.value(key, types.of(key))
    while True:
        marker = yield from cursor.until(markup.in_value, value.push)
        if not marker or (yield from _ends_value(cursor, marker, markup)):
            break
        value.push(marker)
    value.finish(breaks=0 if marker == f"</{markup.value}>" else 1, cut=cursor.cut and not marker)


def _ends_value(cursor: Cursor, marker: str, markup: PairMarkup) -> Reading[bool]:
    """Whether a marker ends the value, or is part of it. Every end but the value's own stays to be read."""
    if marker == f"</{markup.value}>":
        return True
    start = cursor.position
    if marker == f"<{markup.key}>":
        key = yield from cursor.match(IN_KEY)
        ends = bool(key) and (yield from cursor.accept(f"</{markup.key}>"))
    else:  # a value may be a text about calls: at the end of a value, the line ends or a tag follows
        ends = (yield from cursor.peek()) in ("", "\n")
        if not ends:
            ends = bool((yield from cursor.accept_one((f"<{markup.call}>", markup.section_end or f"<{markup.call}>"))))
    cursor.position = start
    if ends:
        cursor.unread(marker)
    return ends


def _drop(_: str) -> None:
    """Drops text between elements."""
