"""Turns SIGINT and SIGTERM into an exception, or into a flag, so that a command's `with` blocks end in order."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(Exception):
    """The process received SIGINT or SIGTERM."""


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Raises Stopped in the main thread at the first SIGINT or SIGTERM. Later signals are ignored during cleanup."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def note_signals() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether SIGINT or SIGTERM has arrived. The second one raises Stopped."""
    arrived = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal arrived
        if arrived:
            raise Stopped
        arrived = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
