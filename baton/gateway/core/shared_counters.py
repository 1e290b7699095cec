"""Counters of one gateway's processes: one row of numbers for each process, in shared memory.

A row has one writer at a time: its process, then the parent once that process has ended. So no increment is lost.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Self

from baton.metrics.metric import Outcome, ProcessRole
from baton.metrics.tally import Layout, Tally

_NUMBER_BYTES = 8


class Count(IntEnum):
    """The first columns of a row.

    RUNNING and WAITING are current numbers of outputs. FINISHED to LOCAL count outputs, and the refusals count
    requests, both since the start of the gateway. BUSY and TOKENS are of the last seconds
    (`baton.gateway.observe.load`). STORED is what the process keeps of answers of /v1/responses.
    """

    RUNNING = 0  # includes waiting outputs
    FINISHED = 1
    FAILED = 2  # without client errors, cancelled and refused requests
    REMOTE = 3
    LOCAL = 4
    REFUSED_FULL = 5  # requests that never ran, by reason
    REFUSED_QUEUE = 6
    REFUSED_DEADLINE = 7
    SHED = 8
    WAITING = 9
    BUSY = 10  # share of the event loop's time in which it worked, in thousandths
    TOKENS = 11  # tokens a second
    STORED = 12  # bytes


REFUSALS = MappingProxyType(
    {
        "full": Count.REFUSED_FULL,
        "queue": Count.REFUSED_QUEUE,
        "deadline": Count.REFUSED_DEADLINE,
        "shed": Count.SHED,
    }
)


class SharedCounters:
    """The rows of all processes. This process writes only its row.

    Args:
        fd: descriptor of the memory that `create` made; None: memory of this process only.

    Attributes:
        layout: layout of the metrics, whose cells are the columns after those of `Count`.
        tally: counts metrics in this process's row.
        row: index of this process's row.
    """

    def __init__(self, rows: int = 1, row: int = 0, fd: int | None = None) -> None:
        self.rows = rows
        self.layout = Layout(ProcessRole.GATEWAY)
        self._width = len(Count) + self.layout.width
        self._memory = mmap.mmap(-1 if fd is None else fd, rows * self._width * _NUMBER_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self.row = row
        self._row_start = row * self._width
        self.tally = Tally(self.layout, self._numbers, self._row_start + len(Count))

    @classmethod
    def create(cls, rows: int) -> "tuple[Self, int]":
        """Makes counters that other processes can share; returns them and the file descriptor to pass on."""
        fd = os.memfd_create("baton-gateway")
        os.ftruncate(fd, rows * (len(Count) + Layout(ProcessRole.GATEWAY).width) * _NUMBER_BYTES)
        return cls(rows, 0, fd), fd

    def add(self, count: Count, number: int) -> None:
        """Adds to a column of this process's row."""
        self._numbers[self._row_start + count] += number

    def set(self, count: Count, number: int) -> None:
        """Sets a column of this process's row."""
        self._numbers[self._row_start + count] = number

    def of_each(self, count: Count) -> list[int]:
        """The column in the rows of all processes."""
        return self._numbers[count :: self._width].tolist()

    def own_cell(self, index: int) -> int:
        """A cell of the metrics of this process alone."""
        return self._numbers[self._row_start + len(Count) + index]

    def total(self, count: Count) -> int:
        return sum(self._numbers[count :: self._width])

    def totals(self) -> list[int]:
        """The cells of the metrics, each summed over all rows."""
        width = self._width
        rows = (self._numbers[row * width + len(Count) : (row + 1) * width].tolist() for row in range(self.rows))
        return [sum(column) for column in zip(*rows, strict=True)]

    def retire_row(self, row: int) -> None:
        """Counts the running outputs of an ended process as failed."""
        first = row * self._width
        ran = self._numbers[first + Count.RUNNING]
        self._numbers[first + Count.FAILED] += ran
        for current in (Count.RUNNING, Count.WAITING, Count.BUSY, Count.TOKENS, Count.STORED):
            self._numbers[first + current] = 0
        failed = self.layout.first("baton_requests_total", (Outcome.FAILED,))
        self._numbers[first + len(Count) + failed] += ran


@dataclass(frozen=True)
class Counters:
    """Totals since the start of the gateway. Each output counts as one request.

    Attributes:
        failed: outputs that failed inside the cluster or reached their deadline.
        refused: requests that never ran, by reason.
    """

    finished: int
    failed: int
    remote: int
    local: int
    refused: Mapping[str, int]

    @classmethod
    def of(cls, counters: SharedCounters) -> Self:
        total = counters.total
        return cls(
            total(Count.FINISHED),
            total(Count.FAILED),
            total(Count.REMOTE),
            total(Count.LOCAL),
            refused={name: total(count) for name, count in REFUSALS.items()},
        )
