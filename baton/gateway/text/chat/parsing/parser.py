"""Parses the outputs of a conversation: reasoning first, then the family's format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.gateway.text.chat.parsing.collector import Collector
from baton.gateway.text.chat.parsing.cursor import Cursor, Markers, Reading
from baton.gateway.text.chat.parsing.json_call import accept_next
from baton.gateway.text.chat.types import ParsedDelta

Read = Callable[[Cursor, Collector], Reading[None]]


@dataclass(frozen=True)
class ReasoningMarkers:
    """What the template writes around reasoning.

    Attributes:
        answer: tags that the model may put around the answer after the reasoning; None: there are none.
    """

    open: str
    close: str
    answer: tuple[str, str] | None = None


class FormatParser:
    """Runs a format's generator over the text as it comes."""

    def __init__(self, read: Read, out: Collector) -> None:
        self._cursor = Cursor()
        self._out = out
        self._reading: Reading[None] | None = read(self._cursor, out)

    def push(self, text: str) -> list[ParsedDelta]:
        self._cursor.push(text)
        return self._go_on()

    def finish(self, *, cut: bool, stopped: bool = False) -> list[ParsedDelta]:
        self._cursor.ended, self._cursor.cut = True, cut
        if cut:
            self._out.cut_off()
        deltas = self._go_on()
        self._out.finish(whole=not cut and not stopped)
        return deltas + self._out.take()

    def _go_on(self) -> list[ParsedDelta]:
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        return self._out.take()


def with_reasoning(
    markers: ReasoningMarkers, read: Read, *, opened: bool, implied: bool = False, marks: Sequence[str] = ()
) -> Read:
    """Reads reasoning, then the rest with `read`.

    Args:
        opened: the prompt ends in reasoning. Otherwise the output begins with the opening marker, or has no reasoning.
        implied: the client asked for reasoning, so the output begins with it even without the opening marker.
        marks: texts that begin a call, and so end implied reasoning.
    """

    def read_both(cursor: Cursor, out: Collector) -> Reading[None]:
        found = yield from accept_next(cursor, markers.open)  # some models repeat the prompt's marker
        if found or opened:
            if not (yield from cursor.until(Markers(markers.close), out.reasoning)):
                return
            out.end_reasoning()
        elif (yield from accept_next(cursor, markers.close)):
            out.end_reasoning()  # an empty reasoning
        elif implied:
            yield from _implied(cursor, out, markers.close, marks)
        if markers.answer is not None and (yield from accept_next(cursor, markers.answer[0])):
            out.drop_in_content(markers.answer[1])
            out.end_reasoning()
        yield from read(cursor, out)

    return read_both


def _implied(cursor: Cursor, out: Collector, close: str, marks: Sequence[str]) -> Reading[None]:
    """Reads reasoning without its opening marker.

    If neither its end nor a call ever comes, the model did not reason, and the text is its answer, too.
    """
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        out.reasoning(text)

    marker = yield from cursor.until(Markers(close, *marks), write)
    if marker == close:
        out.end_reasoning()
    elif marker:
        cursor.unread(marker)
    elif not cursor.cut:
        out.content("".join(pieces))


def without_marker(marker: str, read: Read) -> Read:
    """Reads the rest with `read`, after a closing marker of the reasoning that the prompt has already."""

    def read_rest(cursor: Cursor, out: Collector) -> Reading[None]:
        if (yield from accept_next(cursor, marker)):
            out.end_reasoning()
        yield from read(cursor, out)

    return read_rest
