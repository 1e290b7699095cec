"""Chooses which entry leaves a full store: the one that is cheapest to compute again. Pure.

Implements GreedyDual (Young 1994): an entry's value is its cost plus the value of the last entry that was evicted, so
that old entries lose against new ones at last. All entries of a store have one size, so cost stands for cost a byte. An
entry leaves only after all entries that follow it in its sequences, because those are useless without it.
"""

import heapq
from collections import Counter
from dataclasses import dataclass
from itertools import count

# Outdated rows that the heap may have besides as many as it has entries.
_OUTDATED_MIN = 64
_REFUSED_MAX = 4096


@dataclass(slots=True)
class _Ranked:
    """An entry's rank: its value, and among equal values the time of its last use.

    Attributes:
        queued: the heap has a row with this rank.
    """

    cost: float
    parent: bytes
    value: float
    used: int
    pinned: bool = False
    queued: bool = False


class GreedyDual:
    """The order in which entries leave. Every call takes O(log n), amortized.

    Keys are digests, and an entry's parent is the digest of the entry before it, or a root.
    """

    def __init__(self) -> None:
        self._ranked: dict[bytes, _Ranked] = {}
        self._followers = Counter[bytes]()
        self._heap: list[tuple[float, int, bytes]] = []
        self._uses = count()
        self._inflation = 0.0

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: bytes) -> bool:
        return key in self._ranked

    def add(self, key: bytes, cost: float, parent: bytes) -> None:
        """Adds an entry as the one used last.

        Args:
            cost: of computing its tokens again, in any unit that all entries share.
        """
        assert key not in self._ranked
        self._ranked[key] = _Ranked(cost, parent, self._inflation + cost, next(self._uses))
        self._followers[parent] += 1
        self._queue(key)

    def touch(self, key: bytes) -> None:
        """Marks an entry as used."""
        ranked = self._ranked[key]
        ranked.value, ranked.used, ranked.queued = self._inflation + ranked.cost, next(self._uses), False
        self._queue(key)

    def pin(self, key: bytes) -> None:
        """Keeps an entry, and so those before it, until it is unpinned. Pins are not counted."""
        self._ranked[key].pinned = True

    def unpin(self, key: bytes) -> None:
        self._ranked[key].pinned = False
        self._queue(key)

    def remove(self, key: bytes) -> None:
        """Forgets an entry, pinned or not."""
        parent = self._ranked.pop(key).parent
        self._followers[parent] -= 1
        if not self._followers[parent]:
            del self._followers[parent]
            self._queue(parent)

    def evict(self) -> bytes | None:
        """Removes the entry of least value that is not pinned and that no entry follows. Returns its key; None if there
        is no such entry."""
        while self._heap:
            value, used, key = heapq.heappop(self._heap)
            ranked = self._ranked.get(key)
            if ranked is None or ranked.used != used:
                continue
            ranked.queued = False
            if self._may_leave(key):
                # A parent may be worth less than the child that kept it, so the highest value counts.
                self._inflation = max(self._inflation, value)
                self.remove(key)
                return key
        return None

    def _may_leave(self, key: bytes) -> bool:
        return not self._ranked[key].pinned and key not in self._followers

    def _queue(self, key: bytes) -> None:
        """Gives an entry that may leave its row in the heap, unless it has it."""
        ranked = self._ranked.get(key)
        if ranked is None or ranked.queued or not self._may_leave(key):
            return
        ranked.queued = True
        heapq.heappush(self._heap, (ranked.value, ranked.used, key))
        if len(self._heap) > 2 * len(self._ranked) + _OUTDATED_MIN:
            self._heap = [row for row in self._heap if self._is_current(row)]
            heapq.heapify(self._heap)

    def _is_current(self, row: tuple[float, int, bytes]) -> bool:
        ranked = self._ranked.get(row[2])
        return ranked is not None and ranked.queued and ranked.used == row[1]


class RefusedKeys:
    """The latest keys that a full store refused. Entries that follow them are refused too: they are useless without
    them, and would take the places of those before them."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, key: bytes) -> None:
        self._keys[key] = None
        if len(self._keys) > _REFUSED_MAX:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: bytes) -> None:
        self._keys.pop(key, None)
