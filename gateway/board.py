"""What the processes of one gateway have counted: a row of numbers for each process, in memory that all of them share.

A row has one writer at a time: its process, and the parent once that process has ended. So a sum misses no write.
"""

import mmap
import os
from enum import IntEnum
from typing import Self

_NUMBER_BYTES = 8


class Count(IntEnum):
    """The columns. RUNNING counts outputs now; the others since the start of the gateway, up to LOCAL outputs."""

    RUNNING = 0
    FINISHED = 1
    FAILED = 2  # also cancelled ones
    REMOTE = 3
    LOCAL = 4
    REFUSED_FULL = 5  # requests that never ran, by reason
    REFUSED_QUEUE = 6
    REFUSED_DEADLINE = 7
    SHED = 8


class Board:
    """The rows of all processes, and which one is this process's own.

    Args:
        fd: of the memory that `create_memory` made; None: for this process alone.
    """

    def __init__(self, rows: int = 1, own: int = 0, fd: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if fd is None else fd, rows * len(Count) * _NUMBER_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self._own = own * len(Count)

    @classmethod
    def create(cls, rows: int) -> "tuple[Self, int]":
        """A board that other processes can share, and the file descriptor to give to them."""
        fd = os.memfd_create("baton-gateway")
        os.ftruncate(fd, rows * len(Count) * _NUMBER_BYTES)
        return cls(rows, 0, fd), fd

    def add(self, count: Count, number: int) -> None:
        """Counts in the own row."""
        self._numbers[self._own + count] += number

    def total(self, count: Count) -> int:
        return sum(self._numbers[count :: len(Count)])

    def bury(self, row: int) -> None:
        """The process of this row is gone: what ran there has failed."""
        first = row * len(Count)
        self._numbers[first + Count.FAILED] += self._numbers[first + Count.RUNNING]
        self._numbers[first + Count.RUNNING] = 0
