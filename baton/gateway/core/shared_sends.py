"""Shared memory in which the processes of one gateway record what each has sent to each node, and what they learned.

A node's status shows what the node had when it sent the status. A process knows what it has sent itself since then, and
learns here what the others have sent, so that two processes do not choose the same idle node.
"""

import hashlib
import mmap
import os
from typing import NamedTuple

_NUMBER_BYTES = 8
_ENTRIES = 1 << 14  # each node that was ever listed has one, in each role in which it was used
_PROBES = 64
_LEARNED = 4  # columns for what all processes learn about a node; see `NodeSends.learned`
_COLUMNS = 3  # of each process


class SentWork(NamedTuple):
    """Totals of the work sent to a node since the start of the gateway.

    Attributes:
        tokens: tokens of the requests, without those that the node had cached.
        prompt_ns: predicted time of the prompts that the node computes.
    """

    requests: int
    tokens: int
    prompt_ns: int


NOTHING = SentWork(0, 0, 0)


class NodeSends:
    """The work sent to one node. Each process writes only its own numbers, and the version.

    Args:
        numbers: what was learned, then the version, then the numbers of each process.
        row: index of this process.

    Attributes:
        learned: numbers that all processes write; their meaning is that of `baton.gateway.fleet.second_token`.
    """

    def __init__(self, numbers: memoryview, row: int) -> None:
        self.learned = numbers[:_LEARNED].cast("B").cast("d")
        self._numbers = numbers[_LEARNED:]
        self._own = 1 + row * _COLUMNS

    @property
    def version(self) -> int:
        """Changes with the numbers, and costs a tenth of `by_others`. Of two changes at the same moment, the second may
        show only with the next one."""
        number: int = self._numbers[0]
        return number

    def add_request(self, tokens: int) -> None:
        self._numbers[self._own] += 1
        self._numbers[self._own + 1] += tokens
        self._numbers[0] += 1

    def add_prompt(self, seconds: float) -> None:
        self._numbers[self._own + 2] += int(seconds * 1e9)
        self._numbers[0] += 1

    def by_others(self) -> SentWork:
        """Totals of all other processes."""
        numbers, own = self._numbers.tolist(), self._own
        return SentWork(*(sum(numbers[1 + column :: _COLUMNS]) - numbers[own + column] for column in range(_COLUMNS)))


class SharedSends:
    """The numbers of all nodes.

    Args:
        rows: number of processes.
        row: index of this process.
        fd: descriptor of the memory that `create` made.
    """

    def __init__(self, rows: int, row: int, fd: int) -> None:
        self._row = row
        self._width = _width(rows)
        self._numbers = memoryview(mmap.mmap(fd, _bytes(rows))).cast("q")

    @staticmethod
    def create(rows: int) -> int:
        """Makes the memory; returns its file descriptor, to pass on."""
        fd = os.memfd_create("baton-sends")
        os.ftruncate(fd, _bytes(rows))
        return fd

    def of(self, role: int, address: str) -> NodeSends | None:
        """The node's numbers; None: there is no room for further nodes."""
        name = f"{role} {address}".encode()
        key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big", signed=True) or 1
        for probe in range(_PROBES):
            entry = (key + probe) % _ENTRIES * self._width
            if self._numbers[entry] == 0:
                self._numbers[entry] = key
            if self._numbers[entry] == key:
                return NodeSends(self._numbers[entry + 1 : entry + self._width], self._row)
        return None


def _width(rows: int) -> int:
    return 2 + _LEARNED + rows * _COLUMNS  # key and version


def _bytes(rows: int) -> int:
    return _ENTRIES * _width(rows) * _NUMBER_BYTES
