"""A text stream that never makes its writer wait: a thread writes the lines, so a pipe that nobody reads blocks nobody.

The queue is bounded in bytes. Once it is full, lines are dropped and counted until all queued lines are written; one
line then reports how many were dropped.
"""

import atexit
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

_HELD_BYTES_MAX = 4 << 20
_BEGUN_CHARACTERS_MAX = 1 << 16  # of a line without an end
_DRAIN_S = 0.5  # for a reader, when the process ends
# So often it waits for the thread that writes, which a busy machine may not run for a while. All of it is below
# `exits.WRITE_S`, which would change the exit code.
_DRAINS = 6
_PIPE_BYTES = select.PIPE_BUF  # a pipe that polls as writable takes as many without blocking


class LineStream(io.TextIOBase):
    """A stream whose writes never block. Any thread and any signal handler may write.

    Args:
        descriptor: stays open, and may be shared with other processes.
        encoding: characters that it lacks are written as escapes.

    Attributes:
        notice: makes the line that says how many lines were dropped.
        on_dropped: called with the number of lines whenever some are dropped, under a lock.
        dropped_total: lines that were dropped so far.
    """

    def __init__(self, descriptor: int, *, encoding: str = "utf-8", held_bytes_max: int = _HELD_BYTES_MAX) -> None:
        super().__init__()
        self.notice: Callable[[int], str] = lambda lines: f"{lines} lines dropped: nobody read them in time"
        self.on_dropped: Callable[[int], None] = lambda _: None
        self.dropped_total = 0
        self._descriptor = descriptor
        self._encoding = encoding
        self._held_bytes_max = held_bytes_max
        self._changed = threading.Condition()  # its lock is reentrant: a signal handler may write
        self._held: deque[bytes] = deque()  # the first one is being written
        self._held_bytes = 0
        self._begun = ""  # a line without its end
        self._dropped = 0  # lines since the last notice
        self._stuck = False  # nobody has read since the last wait
        self._ended = False
        threading.Thread(target=self._run, name="lines", daemon=True).start()
        atexit.register(self._end)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        if self._ended:  # NOTE: the thread may have stopped anywhere, also with the lock
            self._write(self._encoded(text), within_s=0.0)
            return len(text)
        with self._changed:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._put(lines + end)
            if len(self._begun) > _BEGUN_CHARACTERS_MAX:
                self._put_begun()
        return len(text)

    def flush(self) -> None:
        """Drains the stream, but waits only once for a reader that does not come."""
        if not self._ended:
            self.drain(0.0 if self._stuck else _DRAIN_S)

    def drain(self, within_s: float | None = None) -> bool:
        """Waits until all is written, but only that long, or `_DRAIN_S`, for a reader; returns whether it is."""
        within_s = _DRAIN_S if within_s is None else within_s
        with self._changed:
            self._put_begun()
            for _ in range(_DRAINS if within_s else 1):
                written = self._changed.wait_for(lambda: not self._held and not self._dropped, within_s)
                if written or not self._has_room():  # while there is room, the thread is late, and not a reader
                    break
            self._stuck = not written
        return written

    def _has_room(self) -> bool:
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        return bool(room.poll(0))

    def _put_begun(self) -> None:
        begun, self._begun = self._begun, ""
        if begun:
            self._put(begun)

    def _put(self, text: str) -> None:
        data = self._encoded(text)
        if self._dropped or self._held_bytes + len(data) > self._held_bytes_max:
            self._dropped += _lines(data)
            self._count(data)
            return
        self._held.append(data)
        self._held_bytes += len(data)
        self._changed.notify_all()

    def _count(self, dropped: bytes) -> None:
        lines = _lines(dropped)
        self.dropped_total += lines
        self.on_dropped(lines)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._held or self._dropped)
                if not self._held:
                    notice, self._dropped = self._encoded(f"{self.notice(self._dropped)}\n"), 0
                    self._held.append(notice)
                    self._held_bytes += len(notice)
                data = self._held[0]
            written = self._write(data)
            with self._changed:
                self._held_bytes -= len(self._held.popleft())
                self._stuck = False
                if not written:  # NOTE: without a notice, which could not be written either
                    self._count(data)
                self._changed.notify_all()

    def _write(self, data: bytes, within_s: float | None = None) -> bool:
        """Writes the data. Returns False if the reader is gone, the disk is full, or the time is over."""
        deadline_s = None if within_s is None else time.monotonic() + within_s
        room = select.poll()
        room.register(self._descriptor, select.POLLOUT)
        rest = memoryview(data)
        while rest:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not room.poll(None if left_s is None else 1e3 * left_s):
                return False
            try:
                rest = rest[os.write(self._descriptor, rest[:_PIPE_BYTES]) :]
            except BlockingIOError:  # another process, which shares the pipe, has made it non-blocking and filled it
                continue
            except OSError:
                return False
        return True

    def _encoded(self, text: str) -> bytes:
        return text.encode(self._encoding, "backslashreplace")

    def _end(self) -> None:
        self.drain()
        self._ended = True


def _lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))
