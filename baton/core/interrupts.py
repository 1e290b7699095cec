"""Ctrl-C while a program is still importing: one line in place of a traceback out of the middle of some package.

Whoever starts a program imports this first, and everything else inside of `plain_interrupts`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130


@contextmanager
def plain_interrupts(program: str) -> Iterator[None]:
    """Inside, SIGINT ends the process at once, with a line and exit code 130. An exception would not do: what is being
    imported may catch it, or turn it into another one. A stream that the caller has closed leads nowhere from here on.
    """
    _open_missing_streams()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored, or someone else's
        yield
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        sys.stderr.write(f"{program}: interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
