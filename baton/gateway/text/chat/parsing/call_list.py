"""Readers shared by several formats: content with calls in between, and lists of JSON calls."""

from collections.abc import Callable

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import CallObject, accept_next, end_of_call, repeats

CallReader = Callable[[Cursor, Collector], Reading[bool]]


def content_only(cursor: Cursor, out: Collector) -> Reading[None]:
    """Reads all text as content."""
    yield from cursor.until(Markers(), out.content)


def between_markers(
    cursor: Cursor, out: Collector, markers: Markers, read_calls: CallReader, *, repeated: bool = False
) -> Reading[None]:
    """Reads content up to a marker, then calls, and so on. A marker without a call after it is content.

    Args:
        repeated: the model may write the marker several times in a row.
    """
    while marker := (yield from cursor.until(markers, out.content)):
        if repeated:
            marker += yield from repeats(cursor, marker)
        start = cursor.position
        if not (yield from read_calls(cursor, out)):
            cursor.back(start)
            out.content(marker)


def objects(
    cursor: Cursor,
    out: Collector,
    known: frozenset[str] | None,
    *,
    separators: str,
    close: str,
    bare: bool,
    ends: Markers,
) -> Reading[bool]:
    """Reads JSON calls up to `close`. Text that is not a call, after the first call, stays to be read as content.

    Args:
        known: names that calls may have; None: any name.
        bare: calls have no marker, so an object without arguments is not a call.
        ends: texts that end a broken call.

    Returns:
        Whether a call has begun.
    """
    begun = False
    end = cursor.position  # of the last call
    while True:
        yield from cursor.skip_space()
        # After the first call within brackets, an object may name any tool.
        call = CallObject(cursor, out, None if begun and close else known, bare=bare, ends=ends)
        ended = yield from call.read()
        if not call.begun:
            cursor.back(end)
            return begun
        begun = True
        if not ended:
            return True
        yield from end_of_call(cursor)
        end = cursor.position
        yield from cursor.skip_space()
        if not (yield from cursor.accept_one(separators)):
            cursor.position = end
            if close:
                yield from accept_next(cursor, close)
            return True
