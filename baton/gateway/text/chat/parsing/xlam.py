"""Reads xLAM's calls: a JSON array, bare at the start of the answer, fenced, or in a tag of other models."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.argument_types import Schemas
from baton.gateway.text.chat.parsing.call_list import between_markers, objects
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next

OPENS = ("```json", "[TOOL_CALLS]", "<tool_call>")
CLOSES = ("```", "</tool_call>")
TAGS = Markers(*OPENS, *CLOSES)


def xlam(schemas: Schemas) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of calls.

    Args:
        schemas: of the tools. An answer may be JSON, too, so the first object of an array must name a tool.
    """
    known = frozenset(schemas)

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        yield from cursor.skip_space()
        if not (yield from cursor.accept("[")):
            return False
        begun = yield from objects(cursor, out, known, separators=",", close="]", bare=True, ends=TAGS)
        if begun:
            for close in CLOSES:
                yield from accept_next(cursor, close)
        return begun

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.back(start)
        yield from between_markers(cursor, out, Markers(*OPENS), read_calls)

    return read
