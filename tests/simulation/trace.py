"""The readable log of one run, one line per event. Lines are formatted only if the trace is wanted."""

import dataclasses
from collections.abc import Sequence

from google.protobuf.message import Message
from google.protobuf.text_format import MessageToString

from tests.simulation.clock import Clock

_VALUE_CHARS_MAX = 220


class Trace:
    """Collects lines such as `0.012345  d1  got SessionMessage(...)`.

    Args:
        wanted: whether lines are kept at all; formatting costs more than the run itself.

    Attributes:
        kinds: the types of the machines' events and commands, collected in any case.
    """

    def __init__(self, clock: Clock, *, wanted: bool) -> None:
        self.wanted = wanted
        self.lines: list[str] = []
        self.kinds: set[type] = set()
        self._clock = clock

    def note(self, who: str, what: str) -> None:
        if self.wanted:
            self.lines.append(f"{self._clock.now_s:10.6f}  {who:4} {what}")

    def handled(self, who: str, events: Sequence[object], commands: Sequence[object]) -> None:
        """Records the events that a machine got and the commands that it returned."""
        self.kinds.update(map(type, events), map(type, commands))
        if not self.wanted:
            return
        for event in events:
            self.note(who, f"got {describe(event)}")
        for command in commands:
            self.note(who, f"  -> {describe(command)}")


def describe(value: object) -> str:
    """One line for an event, a command or a message."""
    if isinstance(value, Message):
        text = MessageToString(value, as_one_line=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.repr]
        text = ", ".join(f"{field.name}={describe(getattr(value, field.name))}" for field in fields)
        return f"{type(value).__name__}({text})"
    elif isinstance(value, Exception):
        text = f"{type(value).__name__}: {value}"
    else:
        text = repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."
