"""Reads calls in DeepSeek's tool tokens: of V3 and R1, with fenced arguments, and of V3.1, with bare ones."""

import re

from baton.gateway.text.chat.parsing.call_list import between_markers
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next, end_of_call, json_value

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
ALL_MARKS = (CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
AFTER_CALL = Markers(CALL_BEGIN, CALL_END, CALLS_END)
ARGUMENTS_END = Markers("```", CALL_BEGIN, CALL_END, CALLS_END)
NAME = re.compile(r"[\w.\-]")


def deepseek(cursor: Cursor, out: Collector) -> Reading[None]:
    """Reads both forms, however the template shows calls."""
    out.trim_content()

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        begun = False
        while True:
            start = cursor.position
            yield from cursor.skip_space()
            if not (yield from cursor.accept(CALL_BEGIN)) or not (yield from _call(cursor, out)):
                cursor.position = start
                break
            begun = True
        if begun:
            yield from accept_next(cursor, CALLS_END)
        return begun

    yield from between_markers(cursor, out, Markers(CALLS_BEGIN), read_calls)


def _call(cursor: Cursor, out: Collector) -> Reading[bool]:
    name = yield from cursor.match(NAME)
    if not (yield from cursor.accept(SEPARATOR)):
        return False
    yield from cursor.skip_space()
    fenced = (yield from cursor.peek()) != "{"
    if fenced:  # the text before the separator is the kind of tool
        name = yield from cursor.match(NAME)
        yield from cursor.skip_space()
        yield from cursor.accept("```json")
        yield from cursor.skip_space()
    if not name or (yield from cursor.peek()) != "{":
        return False
    out.start_call(name)
    if (yield from json_value(cursor, out.arguments, ends=ARGUMENTS_END, forget=True)):
        yield from end_of_call(cursor, *(("```",) if fenced else ()), CALL_END)
    else:
        yield from cursor.skip_until(AFTER_CALL)
        yield from cursor.accept(CALL_END)
    return True
