"""Reads calls that have one XML element for each argument: of Qwen3-Coder, Seed-OSS, MiniMax M2 and DeepSeek V3.2.

The tools' schemas give the arguments their types. Malformed calls are read as by Qwen's own parser,
`qwen3coder_tool_parser.py`, as far as a stream allows.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from baton.gateway.text.chat.parsing.argument_types import ANY, TEXT, ArgumentType, ArgumentTypes, Schemas
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next, json_value, repeats
from baton.gateway.text.chat.parsing.members import Members

IN_TAG = re.compile(r"[^<>\n]")
ATTRIBUTES = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"']+))\s*(?:string="(true|false)")?\s*""")


@dataclass(frozen=True)
class XmlMarkup:
    """The tags of a format. `function` and `parameter` are opening tags up to the name.

    Attributes:
        call: the tag around calls, whose end is `call_end`. Models may leave it out.
        quoted: names stand in quotes, and all calls share one outer tag.
        framed: a value stands on lines of its own.
        typed: the attribute `string` of a parameter says whether the value is a string, and values keep all of their
            text. A function may have a JSON object instead of parameters.
        known_only: a call without the outer tag must name a tool, because an answer may show such elements.
    """

    call: str
    function: str
    parameter: str
    call_end: str
    function_end: str
    parameter_end: str
    quoted: bool = False
    framed: bool = False
    typed: bool = False
    known_only: bool = False

    @property
    def breaks(self) -> int:
        """How many line breaks at each end of a value are the markup's."""
        return 0 if self.typed else 1

    @cached_property
    def in_text(self) -> Markers:
        return Markers(self.call, self.function)

    @cached_property
    def after_call(self) -> Markers:
        return Markers(self.call, self.function, self.call_end)

    @cached_property
    def in_function(self) -> Markers:
        return Markers(self.parameter, self.function_end, self.call_end, self.function, self.call)

    @cached_property
    def in_value(self) -> Markers:
        return Markers(self.parameter_end, self.parameter, self.function_end, self.call_end)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        return self.parameter_end, self.function_end, self.call_end

    @property
    def tags(self) -> tuple[str, ...]:
        """Everything that the reader looks for."""
        return self.call, self.function, self.parameter, *self.ends


QWEN = XmlMarkup("<tool_call>", "<function=", "<parameter=", "</tool_call>", "</function>", "</parameter>", framed=True)
SEED = XmlMarkup("<seed:tool_call>", "<function=", "<parameter=", "</seed:tool_call>", "</function>", "</parameter>")
MINIMAX = XmlMarkup(
    "<minimax:tool_call>", "<invoke name=", "<parameter name=", "</minimax:tool_call>", "</invoke>", "</parameter>",
    quoted=True, known_only=True,
)  # fmt: skip
DSML = XmlMarkup(
    "<｜DSML｜function_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name=",
    "</｜DSML｜function_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>",
    quoted=True, typed=True,
)  # fmt: skip
DSML_V4 = XmlMarkup(
    "<｜DSML｜tool_calls>", "<｜DSML｜invoke name=", "<｜DSML｜parameter name=",
    "</｜DSML｜tool_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>",
    quoted=True, typed=True,
)  # fmt: skip


def xml_calls(schemas: Schemas, markup: XmlMarkup = QWEN) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls such as `<tool_call><function=NAME><parameter=KEY>value</parameter></function>`.

    The outer tag may be missing. An element that is not closed ends where another one begins or its parent ends. Text
    between elements is dropped.
    """

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        markers = markup.in_text
        while marker := (yield from cursor.until(markers, out.content)):
            if marker == markup.call_end:
                continue
            known = frozenset(schemas) if marker == markup.function and markup.known_only else None
            if marker == markup.call:
                marker += yield from repeats(cursor, markup.call)
            start = cursor.position
            if marker == markup.function:
                cursor.unread(marker)
            if (yield from _calls(cursor, out, schemas, markup, known)):
                markers = markup.after_call
            else:
                cursor.position = start
                out.content(marker)

    return read


def _calls(
    cursor: Cursor, out: Collector, schemas: Schemas, markup: XmlMarkup, known: frozenset[str] | None
) -> Reading[bool]:
    """Reads calls and surplus tags around them. Returns whether one has begun.

    Args:
        known: names that the first call may have; None: any name.
    """
    begun = False
    while True:
        start = cursor.position
        name, _ = yield from _tag(cursor, markup.function, markup)
        if not name or (known is not None and name not in known):
            cursor.position = start
            return begun
        out.start_call(name)
        yield from _Call(cursor, out, ArgumentTypes(schemas.get(name, {})), markup).read()
        begun, known = True, None
        while (yield from _accept_end(cursor, markup)):
            pass


def _accept_end(cursor: Cursor, markup: XmlMarkup) -> Reading[bool]:
    for end in markup.ends:
        if (yield from accept_next(cursor, end)):
            return True
    return False


def _tag(cursor: Cursor, begin: str, markup: XmlMarkup) -> Reading[tuple[str, str]]:
    """Reads white space, `begin`, a name and `>`.

    Returns:
        The name, which is empty if it is no such tag, and the attribute `string`, which may be empty.
    """
    start = cursor.position
    if (yield from accept_next(cursor, begin)):
        text = yield from cursor.match(IN_TAG)
        name, string = text.strip(), ""
        if markup.quoted:
            found = ATTRIBUTES.fullmatch(text)
            name = (found[1] or found[2] or found[3] or "") if found else ""
            string = (found[4] or "") if found else ""
        if name and (yield from cursor.accept(">")):
            return name, string
    cursor.position = start
    return "", ""


class _Call:
    """Reads one call after its opening tag."""

    def __init__(self, cursor: Cursor, out: Collector, types: ArgumentTypes, markup: XmlMarkup) -> None:
        self._cursor = cursor
        self._out = out
        self._types = types
        self._markup = markup
        self._members = Members(out)

    def read(self) -> Reading[None]:
        cursor, markup = self._cursor, self._markup
        if markup.typed and (yield from self._json_body()):
            return
        ended = False
        while not ended:
            marker = yield from cursor.until(markup.in_function, _drop)
            if marker == markup.parameter:
                start = cursor.position
                cursor.unread(marker)
                if not (yield from self._parameter()):
                    cursor.position = start
            elif marker == markup.function and self._members.is_empty:  # the tag once more
                continue
            else:
                ended = True
                if marker != markup.function_end:
                    cursor.unread(marker)
        if marker or not cursor.cut:
            self._members.close()

    def _json_body(self) -> Reading[bool]:
        """Reads a JSON object in place of parameters, and drops the rest. Returns whether there is one."""
        cursor, markup = self._cursor, self._markup
        start = cursor.position
        yield from cursor.skip_space()
        if (yield from cursor.peek()) != "{":
            cursor.position = start
            return False
        ends = Markers(*markup.ends, markup.function, markup.call)
        yield from json_value(cursor, self._out.arguments, ends=ends, forget=True)
        yield from cursor.skip_until(ends)
        return True

    def _parameter(self) -> Reading[bool]:
        """Reads one argument. Returns whether it was one."""
        cursor, markup = self._cursor, self._markup
        key, string = yield from _tag(cursor, markup.parameter, markup)
        if not key:
            return False
        if markup.breaks:
            yield from cursor.accept("\n")
        value = self._members.value(key, _type(self._types, key, string))
        while True:
            marker = yield from cursor.until(markup.in_value, value.push)
            if not marker or (yield from self._ends_value(marker)):
                break
            value.push(marker)
        if marker == markup.parameter and value.is_empty and (yield from self._next_key()) == key:  # the tag once more
            return True
        breaks = markup.breaks if marker == markup.parameter_end else 1
        if marker not in (markup.parameter_end, markup.parameter):  # the missing tag had a line break after it, too
            breaks = markup.breaks + 1
        value.finish(breaks=breaks, cut=cursor.cut and not marker)
        return True

    def _ends_value(self, marker: str) -> Reading[bool]:
        """Whether a marker ends the value, or is part of it. Every end but `parameter_end` stays to be read."""
        cursor, markup = self._cursor, self._markup
        if marker == markup.parameter_end:
            return True
        start = cursor.position
        if marker == markup.parameter:
            ends = yield from _rest_of_tag(cursor)
        else:  # a value may be a text about calls: at the end of a value, the line ends or a tag follows
            ends = (yield from cursor.peek()) == "\n" or (yield from _begins_or_ends(cursor, markup))
        cursor.position = start
        if ends:
            cursor.unread(marker)
        return ends

    def _next_key(self) -> Reading[str]:
        start = self._cursor.position
        key, _ = yield from _tag(self._cursor, self._markup.parameter, self._markup)
        self._cursor.position = start
        return key


def _drop(_: str) -> None:
    """Drops text between elements."""


def _type(types: ArgumentTypes, key: str, string: str) -> ArgumentType:
    """Returns the type of an argument: what the schema says, and within that what the attribute `string` says."""
    if not string:
        return types.of(key)
    type = types.of(key, TEXT if string == "true" else ANY)
    return ArgumentType() if string == "true" and type.is_text else type


def _rest_of_tag(cursor: Cursor) -> Reading[bool]:
    name = yield from cursor.match(IN_TAG)
    return bool(name.strip()) and (yield from cursor.accept(">"))


def _begins_or_ends(cursor: Cursor, markup: XmlMarkup) -> Reading[bool]:
    """Whether the text ends, or a tag follows that ends this call or begins the next one."""
    yield from cursor.skip_space()
    tags = (markup.function_end, markup.call_end, markup.call, markup.function)
    return not (yield from cursor.peek()) or bool((yield from cursor.accept_one(tags)))
