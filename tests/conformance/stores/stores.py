"""All stores of the conformance suite. A new one gets a line in STORES."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch

from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.files import FileStore
from kvtransfer.stores.host_memory import HostMemory
from kvtransfer.stores.store import Store, StoreCounters

ENTRY_BYTES = 3 * 4096
# Each store has room for at least as many.
ENTRIES = 64


@dataclass(frozen=True)
class StoreMaker:
    """Opens one kind of store.

    Attributes:
        open: an empty store of entries of ENTRY_BYTES, in an empty folder.
        survives: opened again in the same folder, it has what it had.
        counts: it knows how many entries it keeps.
    """

    name: str
    open: Callable[[Path], AbstractContextManager[Store]]
    survives: bool = False
    counts: bool = True


class HostStore:
    """Host memory with the interface of the stores below it. One thread uses host memory, so calls have a lock."""

    name = "host"

    def __init__(self) -> None:
        self._memory = HostMemory(torch.zeros(ENTRIES * ENTRY_BYTES, dtype=torch.uint8), ENTRY_BYTES)
        self._lock = Lock()

    def has(self, keys: Sequence[EntryKey]) -> int:
        with self._lock:
            return self._memory.find(keys)

    def first(self, keys: Sequence[EntryKey]) -> int:
        with self._lock:
            return self._memory.first(keys)

    def get(self, key: EntryKey, into: memoryview) -> bool:
        with self._lock:
            place = self._memory.pin(key)
        if place is None:
            return False
        into[:] = place.memory
        with self._lock:
            self._memory.unpin(place)
        return True

    def put(self, key: EntryKey, entry: memoryview) -> bool:
        with self._lock:
            if self._memory.find([key]):
                return True
            place = self._memory.take(key, 1.0)
        if place is None:
            return False
        place.memory[:] = entry
        with self._lock:
            self._memory.commit(place)
        return True

    def keep(self, keys: Sequence[EntryKey], keep: KeepTime) -> None:
        with self._lock:
            self._memory.keep(keys, keep)

    def drop(self, keys: Sequence[EntryKey]) -> None:
        with self._lock:
            self._memory.drop(keys)

    def drop_roots(self, roots: frozenset[bytes]) -> int:
        with self._lock:
            return self._memory.drop_roots(roots)

    def knows(self, digest: bytes) -> bool:
        return self._memory.has_digest(digest)

    def take_lost(self) -> Sequence[bytes]:
        return self._memory.take_evicted()

    def found(self, most: int) -> Sequence[EntryKey]:
        return ()

    def counters(self) -> StoreCounters:
        with self._lock:
            return self._memory.counters

    def close(self) -> None:
        """Has nothing to release."""


@contextmanager
def _host(folder: Path) -> Iterator[Store]:
    del folder
    yield HostStore()


@contextmanager
def _files(folder: Path) -> Iterator[Store]:
    store = FileStore(folder, namespace=b"spec", entry_bytes=ENTRY_BYTES, max_bytes=ENTRIES * (ENTRY_BYTES + 4096))
    try:
        yield store
    finally:
        store.close()


STORES = (
    StoreMaker("host", _host),
    StoreMaker("file", _files, survives=True),
)
