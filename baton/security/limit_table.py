"""What clients have used of their limits, in memory that all processes of one gateway share.

Two processes that change the same client's times at the same moment may lose one of the two changes. A lock would cost
more: a process that is stopped while it holds the lock would stop all others.
"""

import hashlib
import mmap
import os
from array import array
from typing import Self

_NUMBER_BYTES = 8
_SETS, _WAYS = 4096, 8  # a client's entry is one of the ways of one set
_KEY, _REQUESTS, _TOKENS, _RUNNING = 0, 1, 2, 3  # columns; one RUNNING column for each process

REQUESTS, TOKENS = _REQUESTS - 1, _TOKENS - 1  # the two times of `LimitCells`


class LimitCells:
    """The numbers of one client: when its allowances are full again, in ns, and its running outputs.

    Args:
        numbers: both times, then the running outputs of each process.
        row: index of this process.
    """

    def __init__(self, numbers: "memoryview | array[int] | None" = None, row: int = 0) -> None:
        self._numbers = array("q", [0, 0, 0]) if numbers is None else numbers
        self._own = _RUNNING - 1 + row

    def full_at_ns(self, which: int) -> int:
        return self._numbers[which]

    def set_full_at_ns(self, which: int, at_ns: int) -> None:
        self._numbers[which] = at_ns

    @property
    def running(self) -> int:
        """The client's running outputs in all processes."""
        return sum(self._numbers[_RUNNING - 1 :])

    def add_running(self, outputs: int) -> None:
        self._numbers[self._own] += outputs


class LimitTable:
    """The entries of all clients that have limits. An entry without a trace of its client may go to another one.

    Args:
        rows: number of processes.
        row: index of this process.
        fd: descriptor of the memory that `create` made; None: memory of this process only.
    """

    def __init__(self, rows: int = 1, row: int = 0, fd: int | None = None) -> None:
        self._row, self._rows = row, rows
        self._width = _RUNNING + rows
        self._memory = mmap.mmap(-1 if fd is None else fd, _bytes(rows))
        self._numbers = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls, rows: int) -> "tuple[Self, int]":
        """Makes a table that other processes can share; returns it and the file descriptor to pass on."""
        fd = os.memfd_create("baton-limits")
        os.ftruncate(fd, _bytes(rows))
        return cls(rows, 0, fd), fd

    def cells(self, client: str, now_ns: int) -> LimitCells | None:
        """The client's cells; None if there is no room for it. Valid while the client has a running output."""
        key = int.from_bytes(hashlib.blake2b(client.encode(), digest_size=8).digest(), "big", signed=True) or 1
        start = (key % _SETS) * _WAYS * self._width
        entries = range(start, start + _WAYS * self._width, self._width)
        first = next((entry for entry in entries if self._numbers[entry + _KEY] == key), None)
        if first is None:
            first = next((entry for entry in entries if self._is_free(entry, now_ns)), None)
            if first is None:
                return None
            self._numbers[first + _KEY] = key
        return LimitCells(self._numbers[first + 1 : first + self._width], self._row)

    def retire_row(self, row: int) -> None:
        """Forgets the running outputs of an ended process."""
        column = self._numbers[_RUNNING + row :: self._width]
        for index, running in enumerate(column):
            if running:
                column[index] = 0

    def _is_free(self, entry: int, now_ns: int) -> bool:
        times = self._numbers[entry + _REQUESTS : entry + _RUNNING]
        return max(times) <= now_ns and not any(self._numbers[entry + _RUNNING : entry + self._width])


def _bytes(rows: int) -> int:
    return _SETS * _WAYS * (_RUNNING + rows) * _NUMBER_BYTES
