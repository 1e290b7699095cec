"""A timer of the event loop that fires within microseconds of its time.

The loop's own timers wait in epoll, which counts in milliseconds and rounds up: up to a fifth of a decode step.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    """The kernel's `itimerspec`: the time between firings, which is 0, and the time until the first."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class PunctualTimer:
    """Calls back on the running event loop once after each `start`, unless it is stopped or started again before.

    Close it before its loop.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        # NOTE: PyDLL keeps Python's lock during a call. To get it back would take longer than the call.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "the kernel gives no timer")
        self._is_set = False
        self._loop.add_reader(self._file, self._fired)

    def start(self, delay_s: float) -> None:
        """Fires after `delay_s`, which is above 0; an earlier time is forgotten."""
        self._set(max(1, round(delay_s * 1e9)))

    def stop(self) -> None:
        """Forgets the time."""
        if self._is_set:
            self._set(0)

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _set(self, delay_ns: int) -> None:
        """Sets the time; 0 is never."""
        spec = _Spec(0, 0, *divmod(delay_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._file, 0, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "the kernel does not set the timer")
        self._is_set = delay_ns > 0

    def _fired(self) -> None:
        with suppress(BlockingIOError):  # stopped or started again after the loop saw that it had fired
            os.read(self._file, 8)
            self._is_set = False
            self._callback()
