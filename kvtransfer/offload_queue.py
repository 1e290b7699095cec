"""The calls to one store below host memory, on threads of their own, because each may take long or never end."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.core.kv_entries import EntryKey, KeepTime
from kvtransfer.stores.store import Store, StoreCounters

T = TypeVar("T")

log = logging.getLogger("baton")

_READERS = 4
# A store whose oldest call is older than this counts as stuck until that call has ended. A read's age begins when it is
# asked for, because a request waits for it, and a write's with its turn: writes wait in line for a store that works.
STUCK_AFTER_S = 2.0
# How many keys may wait with their keep times for a store that is slow: up to 135 MB of them, those of 131 prompts of
# 128,000 tokens, or of 13,000 prompts of 1,280.
_KEEPS_MAX = 1 << 18


class StoreQueue:
    """Calls one store. Reads run next to each other; writes and drops run one by one in their order, so an entry that
    was dropped is not written afterwards.

    The threads are daemons: a call that never ends does not keep the process from ending.

    Attributes:
        writes_pending: puts that have not ended.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = store.name
        self.writes_pending = 0
        self._store = store
        self._clock = clock
        self._counters = StoreCounters()
        self._begun_s: dict[Future[Any], float] = {}
        self._reads = _Threads(f"{store.name}-reads", _READERS)
        self._writes = _Threads(f"{store.name}-writes", 1)
        self._lists = _Threads(f"{store.name}-listing", 1)
        self._keeps: deque[tuple[Future[None], int]] = deque()  # that have not ended, and how many keys each has
        self._keys_to_keep = 0
        self._refuses_keeps = False
        self._listing: Future[Sequence[EntryKey]] | None = None
        self._lost_meanwhile: set[bytes] = set()  # what the store has lost since the listing began

    @property
    def is_stuck(self) -> bool:
        oldest_s = min(list(self._begun_s.values()), default=None)
        return oldest_s is not None and self._clock() - oldest_s > STUCK_AFTER_S

    @property
    def counters(self) -> StoreCounters:
        """The store's totals after its last call; asking for them never waits."""
        return self._counters

    def has(self, keys: tuple[EntryKey, ...]) -> "Future[int]":
        return self._run(self._reads, lambda: self._store.has(keys), 0)

    def first(self, keys: tuple[EntryKey, ...]) -> "Future[int]":
        return self._run(self._reads, lambda: self._store.first(keys), len(keys))

    def get(self, key: EntryKey, into: memoryview) -> "Future[bool]":
        return self._run(self._reads, lambda: self._store.get(key, into), False)

    def put(self, key: EntryKey, entry: memoryview) -> "Future[bool]":
        return self._run(self._writes, lambda: self._store.put(key, entry), False)

    def keep(self, keys: tuple[EntryKey, ...], keep: KeepTime) -> None:
        """Keeps entries for a time, after the writes before it. Does nothing if too many keys wait for that already,
        as they do where a store hangs."""
        while self._keeps and self._keeps[0][0].done():
            self._keys_to_keep -= self._keeps.popleft()[1]
        if self._keys_to_keep <= _KEEPS_MAX // 2:
            self._refuses_keeps = False
        if self._keys_to_keep + len(keys) > _KEEPS_MAX:
            if not self._refuses_keeps:
                waiting = self._keys_to_keep
                log.warning("the store %s is slow: %d keep times wait, and it gets no more", self.name, waiting)
            self._refuses_keeps = True
            return
        self._keeps.append((self._run(self._writes, lambda: self._store.keep(keys, keep), None), len(keys)))
        self._keys_to_keep += len(keys)

    def drop(self, keys: tuple[EntryKey, ...]) -> "Future[None]":
        return self._run(self._writes, lambda: self._store.drop(keys), None)

    def drop_roots(self, roots: frozenset[bytes]) -> "Future[int | None]":
        """The future gets the number of entries; None if the store may still have some."""
        return self._run(self._writes, lambda: self._store.drop_roots(roots), None)

    def knows(self, digest: bytes) -> bool:
        """Whether the store has an entry with this digest, as far as it remembers; asking never waits."""
        return self._store.knows(digest)

    def begin_listing(self, most: int) -> None:
        """Lists entries that were there when the store was opened. On a thread of its own, because it may take long
        while the store works."""
        self._listing = self._run(self._lists, lambda: self._store.found(most), ())

    def take_changes(self) -> tuple[Sequence[bytes], Sequence[EntryKey]]:
        """Digests that the store does not know any more, since the last call, and once its listing has ended the keys
        of the entries that it has not lost since the listing began; asking never waits."""
        if self._listing is None:
            return self._store.take_lost(), ()
        is_listed = self._listing.done()  # asked first, because listed entries may be lost now
        lost = self._store.take_lost()
        self._lost_meanwhile.update(lost)
        if not is_listed:
            return lost, ()
        found = [key for key in self._listing.result() if key.block.digest not in self._lost_meanwhile]
        self._listing = None
        self._lost_meanwhile.clear()
        return lost, found

    def close(self, *, timeout_s: float) -> bool:
        """Waits for the calls and closes the store. Returns whether all threads ended in time."""
        end_s = time.monotonic() + timeout_s
        self._run(self._writes, self._store.close, None)
        ended = [threads.close(end_s) for threads in (self._writes, self._reads, self._lists)]
        return all(ended)

    def _run(self, threads: "_Threads", call: Callable[[], T], otherwise: T) -> "Future[T]":
        future: Future[T] = Future()
        if threads is self._reads:
            self._begun_s[future] = self._clock()

        def run() -> None:
            if threads is not self._lists:
                self._begun_s.setdefault(future, self._clock())
            result = otherwise
            try:
                result = call()
                self._counters = self._store.counters()
            except Exception:
                log.exception("the store %s failed; this counts as a miss", self.name)
            self._begun_s.pop(future, None)
            future.set_result(result)

        threads.add(run)
        return future


class _Threads:
    """Runs calls in their order, on threads that start with the first call."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []

    def add(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        while len(self._started) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._started.append(thread)
            thread.start()

    def close(self, end_s: float) -> bool:
        for _ in self._started:
            self._calls.put(None)
        for thread in self._started:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._started)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
