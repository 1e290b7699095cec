"""Log lines that nobody can forge: what others named, such as nodes and models, begins no line and moves no cursor."""

import logging

from baton.errors import BatonError, InvalidRequest

_TIME = "%H:%M:%S"


class OneLine(logging.Formatter):
    """One line per record: time, process, level, message. Control characters are escaped.

    Lines of a traceback, and of `extra={"lines": text}`, follow, indented.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s {process} %(levelname)s %(message)s", datefmt=_TIME)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        record.message = escaped(record.message)
        line = super().formatMessage(record)
        lines = getattr(record, "lines", "")
        return line + _indented(lines) if lines else line

    def formatException(self, ei: object) -> str:  # noqa: N802 (logging's name)
        return _indented(super().formatException(ei)).removeprefix("\n")  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 (logging's name)
        return _indented(stack_info).removeprefix("\n")


def loggable(error: BatonError) -> str:
    """The error for a log. Of a wrong request only the field, since the message shows what the client sent."""
    if isinstance(error, InvalidRequest):
        return f"{error.reason} in {error.field or 'the request'}"
    return str(error)


def escaped(text: str) -> str:
    """The text with \\n, \\x1b, \\u2028 and the like in place of characters that are not printed."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _indented(text: str) -> str:
    return "".join(f"\n    {escaped(line)}" for line in text.splitlines())
