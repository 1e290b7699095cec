"""Signals while a program is still importing: Ctrl-C prints one line in place of a traceback out of the middle of some
package, and SIGTERM ends also the first process of a container, which the kernel spares while it has no handler.

Whoever starts a program imports this first, and everything else inside of `plain_interrupts`.
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
    """Inside, SIGINT ends the process at once, with a line and exit code 130, SIGTERM with exit code 143. An exception
    would not do: what is being imported may catch it, or turn it into another one. A stream that the caller has closed
    leads nowhere from here on."""
    _open_missing_streams()
    with (
        _ended_by(signal.SIGINT, signal.default_int_handler, INTERRUPTED, f"{program}: interrupted\n"),
        _ended_by(signal.SIGTERM, signal.SIG_DFL, TERMINATED),
    ):
        yield


@contextmanager
def _ended_by(number: signal.Signals, default: object, code: int, line: str = "") -> Iterator[None]:
    """The signal ends the process with the line and the code, unless it is ignored or has somebody's handler."""
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
    """A program that was started without stdout or stderr would fail at its first line, and its first socket would get
    their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)
            assert descriptor == number, "the lowest free number is taken"
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
