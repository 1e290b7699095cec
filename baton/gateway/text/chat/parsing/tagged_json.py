"""Reads JSON calls in a tag: one object, several, or an array of them. Most models write their calls so.

A call ends at its closing tag, at the next opening one, or at its last bracket. Broken JSON is repaired.
"""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.call_list import between_markers, objects
from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import CallObject, accept_next, end_of_call


def tagged_json(close: str, *opens: str) -> Callable[[Cursor, Collector], Reading[None]]:
    """Returns the reader of a format whose calls stand between tags.

    Args:
        close: the closing tag; empty: the format has none.
        opens: the opening tag, and others that the model may write instead.
    """
    tags = Markers(*opens, close)

    def read(cursor: Cursor, out: Collector) -> Reading[None]:
        out.trim_content()
        yield from between_markers(cursor, out, Markers(*opens), read_calls, repeated=True)

    def read_calls(cursor: Cursor, out: Collector) -> Reading[bool]:
        return (yield from json_in_tag(cursor, out, close, tags))

    return read


def json_in_tag(cursor: Cursor, out: Collector, close: str, tags: Markers) -> Reading[bool]:
    """Reads the calls after an opening tag, and the closing tag. Returns whether a call has begun.

    Args:
        tags: the format's tags, which end a broken call.
    """
    yield from cursor.skip_space()
    if (yield from cursor.accept("[")):
        begun = yield from objects(cursor, out, None, separators=",", close="]", bare=False, ends=tags)
        if begun and close:
            yield from accept_next(cursor, close)
        return begun
    begun = False
    end = cursor.position  # of the last call
    while True:
        call = CallObject(cursor, out, None, bare=False, ends=tags)
        ended = yield from call.read()
        if not call.begun:
            cursor.back(end)
            return begun
        begun = True
        if not ended:
            yield from cursor.skip_until(tags)
            yield from cursor.accept(close)
            return True
        yield from end_of_call(cursor)
        end = cursor.position
        yield from cursor.skip_space()
        if close and (yield from cursor.accept(close)):
            return True
        if (yield from cursor.peek()) != "{":
            cursor.position = end
            return True


hermes = tagged_json("</tool_call>", "<tool_call>")
