"""Chooses which entry leaves a full store: the one that is cheapest to compute again. Pure.

Implements GreedyDual (Young 1994): an entry's value is its cost plus the value of the last entry that was evicted, so
that old entries lose against new ones at last. All entries of a store have one size, so cost stands for cost a byte. An
entry leaves only after all entries that follow it in its sequences, because those are useless without it. Entries that
are kept for a time leave after all others, and those of sessions that are over before all others.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from baton.core.kv_entries import KeepTime
from kvtransfer.stores.keep_times import KeepTimes

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

    Args:
        capacity: number of entries when the store is full; a share of them may be kept for a time.
        clock: monotonic seconds, for the times for which entries are kept.
    """

    def __init__(self, capacity: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keeps = KeepTimes(capacity)
        self._clock = clock
        self._ranked: dict[bytes, _Ranked] = {}
        self._followers: dict[bytes, int] = {}
        # Whether it is kept, value, use and key.
        self._heap: list[tuple[bool, float, int, bytes]] = []
        self._uses = count()
        self._inflation = 0.0

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, key: bytes) -> bool:
        return key in self._ranked

    def add(self, key: bytes, cost: float, parent: bytes, *, pinned: bool = False) -> None:
        """Adds an entry as the one used last.

        Args:
            cost: of computing its tokens again, in any unit that all entries share.
        """
        assert key not in self._ranked
        self._ranked[key] = _Ranked(cost, parent, self._inflation + cost, next(self._uses), pinned)
        self._followers[parent] = self._followers.get(parent, 0) + 1
        if not pinned:
            self._queue(key)

    def touch(self, key: bytes) -> None:
        """Marks an entry as used."""
        self._rank(key, self._inflation + self._ranked[key].cost)

    def keep(self, sequence: Sequence[bytes], keep: KeepTime) -> int:
        """Keeps the first entries of a sequence, from the beginning as far as they are here and there is room for this
        tenant. Returns their number."""
        self._end_keeps()
        until_s = self._clock() + keep.seconds
        for number, key in enumerate(sequence):
            ranked = self._ranked.get(key)
            if ranked is None or not self._keeps.keep(key, tenant=keep.tenant, until_s=until_s):
                return number
            self._rank(key, ranked.value)
        return len(sequence)

    def end(self, sequence: Sequence[bytes], tenant: int) -> None:
        """Lets the entries of a sequence leave first, from its end up to one that somebody else needs: another tenant
        keeps it, or other entries follow it."""
        self._end_keeps()
        own_followers = 0
        for key in reversed(sequence):
            if key not in self._ranked:
                continue
            if self._followers.get(key, 0) > own_followers or self._keeps.is_others(key, tenant):
                return
            self._keeps.forget(key)
            self._rank(key, 0.0)
            own_followers = 1

    def pin(self, key: bytes) -> None:
        """Keeps an entry, and so those before it, until it is unpinned. Pins are not counted."""
        self._ranked[key].pinned = True

    def unpin(self, key: bytes) -> None:
        self._ranked[key].pinned = False
        self._queue(key)

    def remove(self, key: bytes) -> None:
        """Forgets an entry, pinned or not."""
        parent = self._ranked.pop(key).parent
        self._keeps.forget(key)
        left = self._followers[parent] - 1
        if left:
            self._followers[parent] = left
        else:
            del self._followers[parent]
            self._queue(parent)

    def evict(self) -> bytes | None:
        """Removes the entry of least value that is not pinned and that no entry follows. Returns its key; None if there
        is no such entry."""
        if self._keeps:
            self._end_keeps()
        while self._heap:
            _, value, used, key = heapq.heappop(self._heap)
            ranked = self._ranked.get(key)
            if ranked is None or ranked.used != used:
                continue
            ranked.queued = False
            if not ranked.pinned and key not in self._followers:
                # A parent may be worth less than the child that kept it, so the highest value counts.
                self._inflation = max(self._inflation, value)
                self.remove(key)
                return key
        return None

    def _queue(self, key: bytes) -> None:
        """Gives an entry that may leave its row in the heap, unless it has it."""
        ranked = self._ranked.get(key)
        if ranked is None or ranked.queued or ranked.pinned or key in self._followers:
            return
        ranked.queued = True
        heapq.heappush(self._heap, (key in self._keeps, ranked.value, ranked.used, key))
        if len(self._heap) > 2 * len(self._ranked) + _OUTDATED_MIN:
            self._heap = [row for row in self._heap if self._is_current(row)]
            heapq.heapify(self._heap)

    def _is_current(self, row: tuple[bool, float, int, bytes]) -> bool:
        ranked = self._ranked.get(row[3])
        return ranked is not None and ranked.queued and ranked.used == row[2]

    def _rank(self, key: bytes, value: float) -> None:
        """Gives an entry another rank, as the one used last."""
        ranked = self._ranked[key]
        ranked.value, ranked.used, ranked.queued = value, next(self._uses), False
        self._queue(key)

    def _end_keeps(self) -> None:
        for key in self._keeps.take_expired(self._clock()):
            self._rank(key, self._ranked[key].value)


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
