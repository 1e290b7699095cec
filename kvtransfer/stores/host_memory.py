"""Entries in host memory: a bounded number of equal places in one tensor, and what is in each. Used by one thread.

It moves no bytes. The caller gets a place, fills or reads it, and gives it back.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.eviction import GreedyDual, RefusedKeys
from kvtransfer.stores.store import StoreCounters


@dataclass(slots=True, eq=False)
class HostPlace:
    """The place of one entry, between `take` and `commit` or `abandon`, and between `pin` and `unpin`.

    Attributes:
        number: of the place in host memory.
        memory: the entry's bytes.
        address: of the first of them.
        source: where an entry that no load has checked yet came from; empty: from this node.
        users: one for the writer, and one for each pin. Nothing else is written to the place before they are gone.
        is_written: committed.
        is_forgotten: dropped: nobody finds the entry any more, and the place is free when its last user is gone.
    """

    key: EntryKey
    number: int
    memory: memoryview
    address: int
    source: str = ""
    users: int = 1
    is_written: bool = False
    is_forgotten: bool = False

    @property
    def tensor(self) -> Tensor:
        """The same memory, uint8."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


class HostMemory:
    """Keeps entries of one size in host memory, and evicts those that are cheapest to compute again.

    Args:
        tensor: uint8, one dimension, on the CPU; pinned where a GPU copies from it. Its caller made it and frees it.
        entry_bytes: size of an entry. The tensor has room for at least one.
        clock: monotonic seconds, for `keep`.
    """

    def __init__(self, tensor: Tensor, entry_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        assert tensor.ndim == 1
        assert tensor.itemsize == 1
        assert tensor.numel() >= entry_bytes > 0
        self._memory, self._address = tensor.view(torch.uint8).numpy().data, tensor.data_ptr()
        self._entry_bytes = entry_bytes
        self._places: dict[bytes, HostPlace] = {}
        self._unused = list(range(tensor.numel() // entry_bytes))[::-1]
        self._order = GreedyDual(len(self._unused), clock=clock)
        self._refused = RefusedKeys()
        self._unwritten = 0
        self._totals = Counter[str]()
        self._evicted: list[bytes] = []

    @property
    def counters(self) -> StoreCounters:
        """Totals so far. Its entries are those that can be found; its hits and misses are of `pin`."""
        entries = len(self._places) - self._unwritten
        return StoreCounters(entries=entries, bytes=entries * self._entry_bytes, **self._totals)

    def find(self, keys: Sequence[EntryKey]) -> int:
        """How many of the first keys it has."""
        for number, key in enumerate(keys):
            if self._written(key) is None:
                return number
        return len(keys)

    def has(self, key: EntryKey) -> bool:
        """Whether it has an entry, or is about to."""
        place = self._places.get(key.block.digest)
        return place is not None and (place.key is key or place.key == key)

    def first(self, keys: Sequence[EntryKey]) -> int:
        """The position of the first of these keys that it has; their number if it has none."""
        return next((number for number, key in enumerate(keys) if self._written(key) is not None), len(keys))

    def take(self, key: EntryKey, cost: float) -> HostPlace | None:
        """Returns a place to write a new entry to; others leave if none is free. End it by `commit` or `abandon`.

        Returns None if the digest's entry is kept or being written. Returns None too if no place is free, and every
        other entry is in use or comes before an entry that is, or the entry before this one got None for that.

        Args:
            cost: of computing the entry's tokens again, relative to other entries.
        """
        digest, _, parent = key.block
        if digest in self._places:
            return None
        # Pinned before another leaves, so that none of the entries before it does.
        self._order.add(digest, cost, parent, pinned=True)
        if not self._unused and (parent in self._refused or not self._evict()):
            self._order.remove(digest)
            self._refused.add(digest)
            return None
        self._refused.discard(digest)
        number, size = self._unused.pop(), self._entry_bytes
        start = number * size
        place = HostPlace(key, number, self._memory[start : start + size], self._address + start)
        self._places[digest] = place
        self._unwritten += 1
        return place

    def commit(self, place: HostPlace) -> None:
        """Ends a `take`: the entry is whole and can be found."""
        assert not place.is_written
        place.is_written = True
        if not place.is_forgotten:
            self._unwritten -= 1
            self._totals["written"] += 1
        self._leave(place)

    def abandon(self, place: HostPlace) -> None:
        """Ends a `take`: the place may hold anything."""
        assert not place.is_written
        self._forget(place)
        self._leave(place)

    def pin(self, key: EntryKey) -> HostPlace | None:
        """Returns the place of an entry, for reading until `unpin`; None if there is no such entry."""
        place = self._written(key)
        if place is None:
            self._totals["misses"] += 1
            return None
        self._totals["hits"] += 1
        place.users += 1
        self._order.touch(key.block.digest)
        self._order.pin(key.block.digest)
        return place

    def unpin(self, place: HostPlace) -> None:
        """Ends one `pin`."""
        assert place.is_written
        self._leave(place)

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        """Keeps the first entries of a sequence as long as asked for, or lets them leave first (`GreedyDual`).

        Args:
            keys: of the sequence from its beginning, maybe without tokens.
        """
        assert not keys or keys[0].block.parent == keys[0].root
        there = [key.block.digest for key in takewhile(self._has_digest, keys)]
        if keep.seconds:
            self._order.keep(there, keep)
        else:
            self._order.end(there, keep.tenant)

    def take_evicted(self) -> tuple[bytes, ...]:
        """Digests of the entries that were evicted since the last call."""
        if not self._evicted:
            return ()
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def has_digest(self, digest: bytes) -> bool:
        """Whether it has an entry with this digest, or is about to."""
        return digest in self._places

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Forgets entries at once, also those that are in use or being written; these places are free after that."""
        for key in keys:
            place = self._places.get(key.block.digest)
            if place is not None and place.key == key:
                self._forget(place)

    def drop_roots(self, roots: frozenset[bytes]) -> int:
        """As `drop`, for every entry with one of these roots. Returns their number."""
        found = [place for place in self._places.values() if place.key.root in roots]
        for place in found:
            self._forget(place)
        return len(found)

    def _written(self, key: EntryKey) -> HostPlace | None:
        # A digest may be another entry's, by chance or by an attacker's work: then tokens, parent or root differ.
        place = self._places.get(key.block.digest)
        return place if place is not None and place.is_written and (place.key is key or place.key == key) else None

    def _has_digest(self, key: EntryKey) -> bool:
        place = self._places.get(key.block.digest)
        return place is not None and place.is_written

    def _evict(self) -> bool:
        digest = self._order.evict()
        if digest is None:
            return False
        place = self._places.pop(digest)
        assert not place.users
        self._unused.append(place.number)
        self._totals["evicted"] += 1
        self._evicted.append(digest)
        return True

    def _forget(self, place: HostPlace) -> None:
        if place.is_forgotten:
            return
        place.is_forgotten = True
        self._unwritten -= not place.is_written
        del self._places[place.key.block.digest]
        self._order.remove(place.key.block.digest)
        if not place.users:
            self._unused.append(place.number)

    def _leave(self, place: HostPlace) -> None:
        assert place.users
        place.users -= 1
        if place.users:
            return
        if place.is_forgotten:
            self._unused.append(place.number)
        else:
            self._order.unpin(place.key.block.digest)
