"""Writes the log of every process as text or JSON: one record a line, with time and zone, role, name and request id.

A log call passes values as `extra={"fields": {...}}`, and long text as `extra={"lines": text}`. The request id comes
from the task (`enter_request`), or from the fields. Names that others chose, such as those of nodes and models, cannot
start a line or move the cursor. No line waits for a reader of stderr (`baton.core.line_stream`).
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Literal, TextIO

from baton.core.errors import readable
from baton.core.line_stream import LineStream
from baton.core.log_lines import escaped

Format = Literal["text", "json"]

# Levels of third parties' loggers are never below this one.
_OTHERS = logging.WARNING
_OURS = ("attention", "baton", "decode_node", "kvtransfer", "prefill_node")

_REQUEST_ID: ContextVar[str] = ContextVar("baton_request_id", default="")


def enter_request(request_id: str) -> None:
    """Assigns the log lines of this task, and of tasks that it starts, to the request from now on."""
    _REQUEST_ID.set(request_id)


@contextmanager
def for_request(request_id: str) -> Iterator[None]:
    """Assigns the block's log lines to the request."""
    token = _REQUEST_ID.set(request_id)
    try:
        yield
    finally:
        _REQUEST_ID.reset(token)


def set_up_logging(level: str, *, role: str, name: str = "", form: Format = "text") -> None:
    """Sends log records to stderr from now on, one line each.

    Args:
        level: lowest level of our own records.
        role: the program, such as gateway or decode_node.
        name: name of this process, once it is known; `show_name` changes it.
    """
    write_in_background("stderr")
    handler = _Handler()
    handler.setFormatter(JsonLines(role, name) if form == "json" else TextLines(role, name))
    logging.basicConfig(level=max(_OTHERS, logging.getLevelName(level.upper())), handlers=[handler], force=True)
    for ours in _OURS:
        logging.getLogger(ours).setLevel(level.upper())


def write_in_background(*names: Literal["stderr", "stdout"]) -> None:
    """Makes writes to these streams wait for no reader from now on. When the process ends, the rest waits for a few
    seconds at most.

    A stream that has been replaced, for example by a test, stays as it is.
    """
    for name in names:
        own = getattr(sys, f"__{name}__")
        if own is not None and getattr(sys, name) is own:
            own.flush()
            setattr(sys, name, LineStream(own.fileno(), encoding=own.encoding))


def dropped_lines() -> int:
    """Lines that this process has dropped because nobody read its stderr in time."""
    return sys.stderr.dropped_total if isinstance(sys.stderr, LineStream) else 0


def count_dropped_lines(count: Callable[[int], None]) -> None:
    """Calls `count` with the number of lines dropped so far, and then whenever some are dropped, on any thread."""
    if isinstance(sys.stderr, LineStream):
        count(sys.stderr.dropped_total)
        sys.stderr.on_dropped = count


def show_name(name: str) -> None:
    """Sets the process's name in later log lines."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, _Lines):
            handler.formatter.name = name


def write_line(text: str) -> None:
    """Writes a line that is not a log record to stderr, in one piece: `print` writes the line's end separately where
    PYTHONUNBUFFERED is set, and lines of several processes then mix. Control characters are escaped."""
    sys.stderr.write(f"{escaped(text)}\n")
    sys.stderr.flush()


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to stderr. `logging.shutdown` waits for what is still to be written, for a bounded time."""

    def __init__(self) -> None:
        super().__init__()
        if isinstance(self.stream, LineStream):
            self.stream.notice = self._notice

    def flush(self) -> None:
        if not isinstance(self.stream, LineStream):  # which would wait
            super().flush()

    def close(self) -> None:
        super().close()
        if isinstance(self.stream, LineStream):
            self.stream.drain()

    def _notice(self, lines: int) -> str:
        message = "%d lines dropped: nobody read this process's stderr in time"
        return self.format(logging.LogRecord("baton", logging.WARNING, "", 0, message, (lines,), None))


class _Lines(logging.Formatter):
    """The part that both formats share: role, name, the fields of a record."""

    def __init__(self, role: str, name: str = "") -> None:
        super().__init__()
        self.role = role
        self.name = name

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Date, time and zone, as ISO 8601 has them."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")

    def fields(self, record: logging.LogRecord) -> dict[str, object]:
        given: Mapping[str, object] = getattr(record, "fields", {})
        request_id = given.get("request_id") or _REQUEST_ID.get()
        return {**({"request_id": request_id} if request_id else {}), **given}


class TextLines(_Lines):
    """`TIME ROLE NAME LEVEL message key=value ...`; control characters are escaped.

    Lines of a traceback, and of `lines`, follow, indented.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = (
            f"{self.formatTime(record)} {' '.join(filter(None, (self.role, escaped(self.name))))} {record.levelname} "
        )
        line += escaped(record.getMessage())
        line += "".join(f" {name}={_quoted(value)}" for name, value in self.fields(record).items())
        for text in _further(self, record):
            line += "".join(f"\n    {escaped(each)}" for each in text.splitlines())
        return line


class JsonLines(_Lines):
    """One JSON object a record: time, level, role, name, message, the fields, and `lines` where there are some."""

    def format(self, record: logging.LogRecord) -> str:
        own = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "role": self.role,
            "name": readable(self.name),
            "message": readable(record.getMessage()),
        }
        lines = [readable(each) for text in _further(self, record) for each in text.splitlines()]
        fields = {name: readable(each) if isinstance(each, str) else each for name, each in self.fields(record).items()}
        return json.dumps({**fields, **own, **({"lines": lines} if lines else {})}, default=_text)


def _further(formatter: logging.Formatter, record: logging.LogRecord) -> Iterator[str]:
    """The texts after the record's message."""
    if lines := getattr(record, "lines", ""):
        yield lines
    if record.exc_info and record.exc_info[0] is not None:
        yield formatter.formatException(record.exc_info)
    if record.stack_info:
        yield record.stack_info


def _text(value: object) -> str:
    return readable(str(value))


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not any(each in text for each in ' "=')
    return text if plain else json.dumps(escaped(text))
