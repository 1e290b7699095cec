"""The places of a rank's entries, in host memory and in the stores below it. Knows no cache and no layout.

`kvtransfer.offload_reads` brings entries from the stores, and `kvtransfer.offload_writes` writes them there.

It outlives transfer threads, because KV of the same model stays valid; one transfer thread at a time uses it.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from baton.core.errors import ConfigError
from baton.core.kv_entries import ENTRY_TOKENS, DroppedEntries, EntryKey, KeepTime, StoreChanges
from kvtransfer.movers.host_pages import HostPages
from kvtransfer.offload_calls import HOST, StoreCalls
from kvtransfer.offload_queue import StoreQueue
from kvtransfer.offload_reads import Fetch, StoreReads
from kvtransfer.offload_writes import StoreWrites
from kvtransfer.records import EntryCounters
from kvtransfer.settings import TransferSettings
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.host_memory import HostMemory, HostPlace
from kvtransfer.stores.store import StoreCounters

PEER = "peer"

# The share of host memory's entries that may wait to be written to one store: they stay in host memory until then.
_WRITES_SHARE = 1 / 4
# Where there are stores, this share of host memory, but no more than these places, only passes entries on to loads.
# So a sequence that is longer than host memory can be loaded from a store, and places in use never end a load.
_PASSING_SHARE = 1 / 8
_PASSING_MAX = 8
# For so long after a drop of a root nothing of it comes back, from a store that drops it slowly or from another node
# that has it still. Longer than a drop and a pull take.
_DROPPED_S = 30.0
# After a start, so many entries of a store are made known to gateways.
_FOUND_MAX = 1 << 14
_CLOSE_TIMEOUT_S = 5.0
_GIB = 1 << 30


class EntryTiers:
    """The entries of one rank.

    Args:
        layout: of the rank's entries.
        settings: sizes and stores.
        clock: monotonic seconds, for the limits of calls to stores.
        pages: the host memory, if there is some already; it is closed with the tiers.

    Attributes:
        places: of entries in host memory, once it is open.

    Raises:
        ConfigError: the host cache has no room for one entry, or for two if there are stores below it.
    """

    def __init__(
        self,
        layout: EntryLayout,
        settings: TransferSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        pages: HostPages | None = None,
    ) -> None:
        least = layout.entry_bytes * (1 + len(layout.pieces) + bool(settings.stores))
        if settings.host_cache_bytes < least:
            state = " with a recurrent state" if layout.pieces else ""
            raise ConfigError(
                f"the host cache has {settings.host_cache_bytes} bytes, and {ENTRY_TOKENS} tokens of KV{state} have "
                f"{layout.entry_bytes * (1 + len(layout.pieces))}",
                field="host_cache_gib",
                value=round(settings.host_cache_bytes / _GIB, 6),
                allowed=("0", f"at least {math.ceil(1e6 * least / _GIB) / 1e6:.6f}"),
                cure="raise --host-cache-gib",
            )
        self.layout = layout
        self._settings = settings
        self._clock = clock
        self._pages = pages
        self._host: HostMemory
        self._calls: StoreCalls
        self.places = 0
        self._stores: list[StoreQueue] = []
        self._reads: StoreReads
        self._writes: StoreWrites
        # The places that saves fill.
        self._saving: dict[EntryKey, HostPlace] = {}
        self._dropped: dict[bytes, float] = {}  # until when a root is not brought back
        self._saved = self._failed = self._not_read = 0
        self._pulled = self._served = 0
        self._loaded, self._damaged = Counter[str](), Counter[str]()

    def open(self, open_host_memory: Callable[[int], HostPages]) -> None:
        """Allocates host memory and opens the stores, once."""
        if self.places:
            return
        layout, settings = self.layout, self._settings
        places, size = settings.host_cache_bytes // layout.entry_bytes, layout.entry_bytes
        passing = min(_PASSING_MAX, max(1, int(places * _PASSING_SHARE))) if settings.stores else 0
        pages = self._pages or open_host_memory(settings.host_cache_bytes)
        passed, kept = pages.tensor[: passing * size], pages.tensor[passing * size : places * size]
        self._pages, self._host = pages, HostMemory(kept, size, clock=self._clock)
        self.places = places - passing
        for open_store in settings.stores:
            store = StoreQueue(open_store(layout), clock=self._clock)
            self._stores.append(store)
            if not layout.pieces:  # where the states are that make entries useful, names of files do not say
                store.begin_listing(_FOUND_MAX)
        self._calls = StoreCalls(self._host, self._stores, self._clock)
        self._writes = StoreWrites(self._host, self._stores, most=max(1, int(self.places * _WRITES_SHARE)))
        self._reads = StoreReads(
            layout,
            self._host,
            self._stores,
            self._calls,
            passed.split(size) if passing else (),
            clock=self._clock,
            is_dropped=self.is_dropped,
            write=self._writes.begin,
        )

    def close(self) -> None:
        """Waits for the stores, but not for those that hang. No transfer thread uses the tiers any more."""
        if self._pages is None:
            return
        end_s = time.monotonic() + _CLOSE_TIMEOUT_S
        for store in self._stores:
            store.close(timeout_s=max(0.0, end_s - time.monotonic()))
        self._pages.close()

    # ---- for saves

    def has(self, key: EntryKey) -> bool:
        """Whether host memory has an entry, or is about to."""
        return self._host.has(key)

    def is_coming(self, key: EntryKey) -> bool:
        """Whether host memory is about to have an entry."""
        reads = self._reads.under_way
        coming = self._saving.get(key), reads[key].place if key in reads else None
        return any(isinstance(place, HostPlace) and not place.is_forgotten for place in coming)

    def take(self, key: EntryKey, *, is_pulled: bool = False) -> HostPlace | None:
        """Makes room for a new entry, which ends with `commit` or `abandon`. Returns None if there is none now.

        Args:
            is_pulled: it comes from another node, and ends with `commit_pulled` or `abandon`.
        """
        place = self._host.take(key, self.layout.cost(key))
        if place is not None:
            self._saving[key] = place
            place.source = PEER if is_pulled else ""
        return place

    def commit(self, place: HostPlace) -> None:
        """Keeps an entry, unless it has been dropped meanwhile, and writes it behind."""
        self._end_saving(place)
        self._host.commit(place)
        if not place.is_forgotten:
            self._saved += 1
            self._writes.begin(place.key)

    def commit_pulled(self, place: HostPlace) -> None:
        """Keeps an entry from another node, unless it has been dropped meanwhile. It is not written behind, because
        nothing has checked it yet, and the other node has it."""
        self._end_saving(place)
        self._host.commit(place)
        self._pulled += not place.is_forgotten

    def is_pulling(self, key: EntryKey) -> bool:
        """Whether an entry is on its way from another node."""
        return key in self._saving and self._saving[key].source == PEER

    def served(self) -> None:
        """Counts an entry that another node got."""
        self._served += 1

    def abandon(self, place: HostPlace) -> None:
        """Gives a place back whose entry is not complete. Nothing writes to it any more."""
        self._end_saving(place)
        self._host.abandon(place)

    def count(self, keys: Sequence[EntryKey]) -> int:
        """How many of the first keys host memory has."""
        return self._host.find(keys)

    def no_room(self, entries: int) -> None:
        """Counts entries that were not saved."""
        self._failed += entries

    # ---- for loads

    def fetch(self, key: EntryKey, *, entry_s: float = math.inf) -> Fetch | None:
        """Finds an entry, in host memory or else in a store. Ends with `release`. Returns None if the caller must ask
        again later, because the entry is being saved or there is no room to read it into.

        Args:
            entry_s: stores whose reads took longer lately are not asked.
        """
        place = self._host.pin(key)
        if place is not None:
            return Fetch(key, True, place, place.source or HOST)
        return None if key in self._saving else self._reads.fetch(key, entry_s)

    def release(self, fetch: Fetch) -> None:
        """Ends a load's interest in an entry. Nothing reads its place any more."""
        if isinstance(fetch.place, HostPlace):
            self._host.unpin(fetch.place)
        else:
            self._reads.release(fetch)

    def loaded(self, fetches: Iterable[Fetch]) -> None:
        """Counts entries that a load has read."""
        for fetch in fetches:
            self._loaded[fetch.source] += 1
            if isinstance(fetch.place, HostPlace):
                fetch.place.source = ""

    def missing(self, fetch: Fetch | None = None) -> None:
        """Counts an entry that ended a load because it was not there, or not in time, or was not worth to be read."""
        if fetch is not None and fetch.is_too_slow:
            self._not_read += 1
        else:
            self._failed += 1

    def damaged(self, fetch: Fetch, *, state_after: EntryKey | None = None) -> None:
        """Counts a damaged entry and forgets it where it came from.

        Args:
            state_after: it is a piece of the state after that entry, which is not to be found any more.
        """
        self._damaged[fetch.source] += 1
        forgotten = (fetch.key,) if state_after is None else (fetch.key, self.layout.last_state_key(state_after))
        self._calls.drop_damaged(forgotten, fetch.source)

    def damaged_on_its_way(self) -> None:
        """Counts an entry of another node that arrived damaged, and was not kept."""
        self._damaged[PEER] += 1

    # ---- for callers

    def find(self, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """The future gets the number of leading keys that host memory or a store has."""
        self._calls.find(keys, future)

    def find_first(self, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """The future gets the position of the first of these keys that host memory or a store has; their number if none
        has any."""
        self._calls.find_first(keys, future)

    def keep(self, keys: tuple[EntryKey, ...], keep: KeepTime) -> None:
        """Keeps the first entries of a sequence for a time. Stores do so after the writes before it."""
        self._host.keep(keys, keep)
        for store in self._stores:
            store.keep(keys, keep)

    def drop(self, keys: tuple[EntryKey, ...], future: "Future[None]") -> None:
        """Forgets entries. The future is done when all stores have."""
        self._reads.forget(frozenset(keys).__contains__)
        self._calls.drop(keys, future)

    def drop_roots(self, roots: frozenset[bytes], future: "Future[DroppedEntries]") -> None:
        """Forgets every entry with one of these roots. The future is done when all stores have, or are late."""
        now_s = self._clock()
        self._dropped = {root: end_s for root, end_s in self._dropped.items() if now_s < end_s}
        self._dropped |= dict.fromkeys(roots, now_s + _DROPPED_S)
        self._reads.forget(lambda key: key.root in roots)
        self._calls.drop_roots(roots, future)

    def is_dropped(self, root: bytes) -> bool:
        """Whether a root was dropped just now, so that nothing of it may come back from elsewhere."""
        return bool(self._dropped) and self._clock() < self._dropped.get(root, 0.0)

    def take_changes(self) -> StoreChanges | None:
        """What has changed since the last call. Returns None if nothing has."""
        left = [*self._host.take_evicted(), *(self._reads.take_passed() if self._reads.passed else ())]
        lost, found = list[bytes](), list[EntryKey]()
        for store in self._stores:
            lost_there, listed = store.take_changes()
            lost += lost_there
            found += [key for key in listed if not self.is_dropped(key.root)]
        gone, below = list[bytes](), list[bytes]()
        for digest in dict.fromkeys((*left, *lost)):
            if self._host.has_digest(digest):
                continue
            is_below = any(store.knows(digest) for store in self._stores)
            (below if is_below else gone).append(digest)
        return StoreChanges(tuple(gone), tuple(below), tuple(found)) if gone or below or found else None

    def step(self) -> bool:
        """Takes the answers of the stores. Returns whether there was one."""
        if not self.is_busy:
            return False
        is_read = bool(self._reads.under_way) and self._reads.step()
        is_written = bool(self._writes.ended) and self._writes.step()
        return self._calls.step() or is_written or is_read

    @property
    def is_busy(self) -> bool:
        """Whether a store has not answered yet."""
        return bool(self._reads.under_way or self._calls) or any(store.writes_pending for store in self._stores)

    @property
    def calls_waiting(self) -> int:
        """How many calls of `find` and `drop` have not ended."""
        return len(self._calls)

    def stop_waiting(self) -> None:
        """Ends calls of `find` with what they have found. Those of `drop` get no answer, though stores still drop."""
        self._calls.stop_waiting()

    def counters(self) -> EntryCounters:
        """Totals; any thread may call it."""
        if not self.places:
            return EntryCounters()
        host = self._host.counters
        return EntryCounters(
            entries=host.entries,
            bytes=host.bytes,
            saved=self._saved,
            loaded=self._loaded.copy(),
            evicted=host.evicted,
            damaged=self._damaged.total(),
            damaged_from=self._damaged.copy(),
            failed=self._failed,
            not_written=self._writes.refused,
            not_read=self._not_read,
            stores={store.name: self._reads.measured(store) for store in self._stores} | self._of_peers(),
            served=self._served,
        )

    def _of_peers(self) -> dict[str, StoreCounters]:
        return {PEER: StoreCounters(hits=self._pulled)} if self._pulled else {}

    def _end_saving(self, place: HostPlace) -> None:
        if self._saving.get(place.key) is place:
            del self._saving[place.key]
