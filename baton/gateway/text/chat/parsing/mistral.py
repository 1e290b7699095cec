"""Reads Mistral's calls: `[TOOL_CALLS]` with an array of objects, or `[TOOL_CALLS]name[ARGS]{...}`."""

import re

from baton.gateway.text.chat.parsing.call_list import between_markers, objects
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import end_of_call, json_value

MARKS = Markers("[TOOL_CALLS]")
NAME = re.compile(r"[\w.\-]")


def mistral(cursor: Cursor, out: Collector) -> Reading[None]:
    """Reads both forms; a template shows one of them."""
    out.trim_content()
    yield from between_markers(cursor, out, MARKS, _calls)


def _calls(cursor: Cursor, out: Collector) -> Reading[bool]:
    yield from cursor.skip_space()
    if (yield from cursor.accept("[")):
        return (yield from objects(cursor, out, None, separators=",", close="]", bare=False, ends=MARKS))
    name = yield from cursor.match(NAME)
    if (yield from cursor.accept("[CALL_ID]")):
        yield from cursor.match(NAME)
    yield from cursor.accept("[ARGS]")
    yield from cursor.skip_space()
    if not name or (yield from cursor.peek()) != "{":
        return False
    out.start_call(name)
    yield from json_value(cursor, out.arguments, ends=MARKS, forget=True)
    yield from end_of_call(cursor)
    return True
