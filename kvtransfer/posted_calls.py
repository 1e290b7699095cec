"""Calls that other threads post to the transfer thread, which runs them in order and answers through futures."""

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from baton.core.errors import BatonError

T = TypeVar("T")


class PostedCalls:
    """Takes calls from `open` to `fail`. Any thread may post; one thread runs them."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], bool]] = queue.SimpleQueue()
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()  # guards `_ended` against a post that comes while the thread ends
        self._ended: Exception | None = None
        self._wake_fd = -1

    def open(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def close(self) -> None:
        os.close(self._wake_fd)
        self._wake_fd = -1

    @property
    def num_waiting(self) -> int:
        """Number of calls that have not begun."""
        return self._calls.qsize()

    @property
    def is_open(self) -> bool:
        return self._wake_fd >= 0

    def post(self, function: Callable[["Future[T]"], None], *, is_urgent: bool = True) -> "Future[T]":
        """Lets the thread run a function, which completes the future that it receives, now or later.

        Args:
            is_urgent: it is followed soon by something that a caller waits for.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                function(future)
            except BatonError as error:
                future.set_exception(error)

        with self._lock:
            if self._ended is not None:
                future.set_exception(self._ended)
                return future
            self._pending.add(future)
            self._calls.put((run, is_urgent))
            os.eventfd_write(self._wake_fd, 1)
        future.add_done_callback(self._pending.discard)
        return future

    # ---- on the thread

    def fileno(self) -> int:
        """Readable after a post, until `take_wake_up`."""
        return self._wake_fd

    def take_wake_up(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def run(self, *, within_s: float = math.inf) -> bool:
        """Runs the calls posted so far, or as many as begin within that time. Returns whether one was urgent."""
        if self._calls.empty():
            return False
        end_s = time.monotonic() + within_s
        any_urgent = False
        while not self._calls.empty():
            run, is_urgent = self._calls.get_nowait()
            run()
            any_urgent |= is_urgent
            if time.monotonic() >= end_s:
                break
        return any_urgent

    def fail(self, error: Exception) -> None:
        """Fails every waiting and every later call with this error."""
        with self._lock:
            self._ended = error
        for future in list(self._pending):
            with suppress(InvalidStateError):  # done, or cancelled
                future.set_exception(error)
