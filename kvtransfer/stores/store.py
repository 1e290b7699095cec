"""The Protocol of stores below host memory. Several threads call them, and each call may take long.

A store may always answer "no". It is never trusted: whoever reads an entry checks the digest in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.core.kv_entries import EntryKey, KeepTime


@dataclass(frozen=True)
class StoreCounters:
    """Totals of a store.

    Attributes:
        entries, bytes: kept now.
        hits, misses: of `get`.
        written, evicted: entries.
        damaged: entries that were there and could not be used: truncated, foreign, of another format.
        failed: calls that an error of the disk or network ended.
        reads, read_s: entries that were read into host memory, and the time of that; who reads counts them.
    """

    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    written: int = 0
    evicted: int = 0
    damaged: int = 0
    failed: int = 0
    reads: int = 0
    read_s: float = 0.0


class Store(Protocol):
    """Keeps entries of one size for one rank. No method raises for what a disk, a peer or another process does: that is
    a miss, and is counted.

    Attributes:
        name: in metrics and log lines, such as `file`.
    """

    name: str

    def has(self, keys: Sequence[EntryKey]) -> int:
        """How many of the first keys it has. A later `get` may fail all the same."""
        ...

    def first(self, keys: Sequence[EntryKey]) -> int:
        """The position of the first of these keys that it has; their number if it has none."""
        ...

    def get(self, key: EntryKey, into: memoryview) -> bool:
        """Reads an entry into `into`, which has its size. Returns whether all of it is there."""
        ...

    def put(self, key: EntryKey, entry: memoryview) -> bool:
        """Keeps a copy of an entry. Returns whether it did; an entry that it has already is not written again."""
        ...

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        """Keeps the first entries of a sequence for a time, as far as they are there and the tenant's share goes. A
        store whose owner is another process may ignore it.

        Args:
            keys: of the sequence from its beginning, maybe without tokens.
        """
        ...

    def drop(self, keys: Sequence[EntryKey]) -> None:
        """Forgets these entries."""
        ...

    def drop_roots(self, roots: frozenset[bytes]) -> int | None:
        """Forgets every entry with one of these roots, also those of other namespaces. Returns their number.

        Returns None if it may still have some.
        """
        ...

    def knows(self, digest: bytes) -> bool:
        """Whether it has an entry with this digest, as `put` keeps it, as far as it remembers. Never waits.

        An entry that it reads without knowing it lies there in another form, and is put again."""
        ...

    def take_lost(self) -> Sequence[bytes]:
        """Digests that it does not know any more, since the last call. Never waits."""
        ...

    def found(self, most: int) -> Sequence[EntryKey]:
        """Keys of entries that were there when it was opened, those before each one too: up to so many, the latest
        ones. Empty if it cannot know. It may read all of their headers."""
        ...

    def counters(self) -> StoreCounters:
        """Totals since it was opened."""
        ...

    def close(self) -> None:
        """Waits for its own writes, and releases what it holds."""
        ...
