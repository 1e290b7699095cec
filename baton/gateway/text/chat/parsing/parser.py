"""The `OutputParser` of a conversation: reasoning first, then the family's format."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.types import ParsedDelta

Read = Callable[[Cursor, Collector], Reading[None]]


@dataclass(frozen=True)
class ReasoningMarkers:
    """What the template writes around reasoning."""

    open: str
    close: str


class FormatParser:
    """Runs a format's generator over the text as it comes."""

    def __init__(self, read: Read, out: Collector) -> None:
        self._cursor = Cursor()
        self._out = out
        self._reading: Reading[None] | None = read(self._cursor, out)

    def push(self, text: str) -> list[ParsedDelta]:
        self._cursor.push(text)
        return self._go_on()

    def finish(self, *, cut: bool) -> list[ParsedDelta]:
        self._cursor.ended, self._cursor.cut = True, cut
        deltas = self._go_on()
        self._out.finish()
        return deltas + self._out.take()

    def _go_on(self) -> list[ParsedDelta]:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        return self._out.take()


def with_reasoning(markers: ReasoningMarkers, read: Read, *, opened: bool) -> Read:
    """Reads reasoning, then the rest with `read`.

    Args:
        opened: the prompt ends in reasoning. Otherwise it begins with a marker, or there is none.
    """

    def read_both(cursor: Cursor, out: Collector) -> Reading[None]:
        reasons = opened
        if not reasons:
            start = cursor.position
            yield from cursor.skip_space()
            reasons = yield from cursor.accept(markers.open)
            cursor.position = cursor.position if reasons else start
        if reasons:
            if opened:  # some models repeat the marker
                start = cursor.position
                yield from cursor.skip_space()
                if not (yield from cursor.accept(markers.open)):
                    cursor.position = start
            if (yield from cursor.until(Markers(markers.close), out.reasoning)):
                out.end_reasoning()
        yield from read(cursor, out)

    return read_both
