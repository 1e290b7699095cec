"""Reads the calls of Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`,
within a section of calls or, if the model forgets it, without one."""

import re

from baton.gateway.text.chat.parsing.call_list import between_markers
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next, end_of_call, json_value

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ALL_MARKS = (SECTION, CALL, ARGUMENTS, CALL_END, SECTION_END)
ENDS = Markers(CALL, CALL_END, SECTION_END)
IN_ID = re.compile(r"[^<>\n]")
INDEX = re.compile(r":\d*$")


def kimi(cursor: Cursor, out: Collector) -> Reading[None]:
    """Reads calls whose ids name their functions."""
    out.trim_content()
    yield from between_markers(cursor, out, Markers(SECTION, CALL), _calls, repeated=True)


def _calls(cursor: Cursor, out: Collector) -> Reading[bool]:
    begun = False
    while True:
        start = cursor.position
        yield from accept_next(cursor, CALL)
        if not (yield from _call(cursor, out)):
            cursor.position = start
            break
        begun = True
    if begun:
        yield from accept_next(cursor, SECTION_END)
    return begun


def _call(cursor: Cursor, out: Collector) -> Reading[bool]:
    call_id = yield from cursor.match(IN_ID)
    name = INDEX.sub("", call_id.strip()).removeprefix("functions.")
    if not name or not (yield from cursor.accept(ARGUMENTS)):
        return False
    out.start_call(name)
    yield from cursor.skip_space()
    if (yield from cursor.peek()) == "{":
        if (yield from json_value(cursor, out.arguments, ends=ENDS, forget=True)):
            yield from end_of_call(cursor)
    elif not cursor.cut or (yield from cursor.peek()):
        out.arguments("{}")
    yield from cursor.skip_until(ENDS)
    yield from cursor.accept(CALL_END)
    return True
