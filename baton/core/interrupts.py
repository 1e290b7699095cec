"""Handles signals while a program is still importing: Ctrl-C prints one line instead of a traceback from inside some
package, and SIGTERM also ends the first process of a container, which the kernel spares while it has no handler.

A program imports this module first, and everything else inside of `plain_interrupts`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
TERMINATED = 143


@contextmanager
def plain_interrupts(program: str) -> Iterator[None]:
    """Lets SIGINT end the process at once, with a line and exit code 130, and SIGTERM with exit code 143. An exception
    would not do: the package being imported may catch or replace it. A standard stream that the caller has closed is
    opened to /dev/null."""
    _open_missing_streams()
    with (
        _ended_by(signal.SIGINT, signal.default_int_handler, INTERRUPTED, f"{program}: interrupted\n"),
        _ended_by(signal.SIGTERM, signal.SIG_DFL, TERMINATED),
    ):
        yield


@contextmanager
def _ended_by(number: signal.Signals, default: object, code: int, line: str = "") -> Iterator[None]:
    """Lets the signal end the process with the line and the code, unless it is ignored or has a handler already."""
    before = signal.getsignal(number)
    if before is not default:
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.stderr.write(line)
        sys.stderr.flush()
        os._exit(code)

    signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(number, before)


def _open_missing_streams() -> None:
    """Opens missing standard streams to /dev/null: without them a program would fail at its first line, and its first
    socket would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)
            assert descriptor == number, "the lowest free number is taken"
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
