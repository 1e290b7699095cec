"""Entries on their way from the stores below host memory to loads: into host memory, or past it while that is full."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from torch import Tensor

from baton.core.kv_entries import EntryKey
from kvtransfer.offload_calls import HOST, StoreCalls
from kvtransfer.offload_queue import StoreQueue
from kvtransfer.stores.entry import EntryLayout
from kvtransfer.stores.host_memory import HostMemory, HostPlace
from kvtransfer.stores.read_speed import ReadSpeed
from kvtransfer.stores.store import StoreCounters


@dataclass(eq=False)
class PassingPlace:
    """The place of an entry that goes from a store to loads and is not kept.

    Attributes:
        is_forgotten: its entry was dropped while it was read, so no load gets it.
    """

    tensor: Tensor
    users: int = 0
    is_forgotten: bool = False

    @property
    def memory(self) -> memoryview:
        return self.tensor.numpy().data


@dataclass(eq=False)
class Fetch:
    """An entry that a load waits for or reads, and whose place stays as it is meanwhile.

    Attributes:
        done: whether it is known if some store has the entry.
        place: where it is; None: no store has it.
        source: `host`, or the name of the store that it came from.
        is_too_slow: no store was asked, because computing is faster.
    """

    key: EntryKey
    done: bool = False
    place: HostPlace | PassingPlace | None = None
    source: str = HOST
    is_too_slow: bool = False


@dataclass(eq=False)
class StoreRead:
    """An entry on its way from a store to host memory. Its place stays taken until the store has answered, even if
    nothing waits for it any more."""

    key: EntryKey
    place: HostPlace | PassingPlace
    store: StoreQueue
    answer: Future[bool]
    others: list[StoreQueue]
    waiting: list[Fetch] = field(default_factory=list)


class StoreReads:
    """The reads that have not ended, and the places that pass entries on.

    Args:
        layout: of the rank's entries.
        stores: in the order in which they are asked.
        calls: says which stores are usable.
        passing: memory of entries that only pass.
        clock: monotonic seconds.
        is_dropped: says whether nothing of a root may come back now.
        write: writes an entry of host memory to the stores.

    Attributes:
        under_way: reads by their entries.
        passed: digests of the entries that have passed; `take_passed` takes them.
        passing: the places that are free.
    """

    def __init__(
        self,
        layout: EntryLayout,
        host: HostMemory,
        stores: Sequence[StoreQueue],
        calls: StoreCalls,
        passing: Sequence[Tensor],
        *,
        clock: Callable[[], float],
        is_dropped: Callable[[bytes], bool],
        write: Callable[[EntryKey], None],
    ) -> None:
        self.under_way: dict[EntryKey, StoreRead] = {}
        self.passed: list[bytes] = []
        self.passing = [PassingPlace(tensor) for tensor in passing]
        self._layout = layout
        self._host = host
        self._calls = calls
        self._clock = clock
        self._is_dropped = is_dropped
        self._write = write
        self._speeds = {store.name: ReadSpeed() for store in stores}

    def fetch(self, key: EntryKey, entry_s: float) -> Fetch | None:
        """Finds an entry that host memory lacks: as `EntryTiers.fetch`, and ends with `release`."""
        place: HostPlace | PassingPlace | None
        if self._is_dropped(key.root) or self._calls.is_dropping(key):
            return Fetch(key, True)
        read = self.under_way.get(key)
        if read is None:
            usable = self._calls.usable_stores()
            stores = [store for store in usable if self._is_faster(store, entry_s)]
            if not stores:
                return Fetch(key, True, is_too_slow=bool(usable))
            place = self._host.take(key, self._layout.cost(key)) or (self.passing.pop() if self.passing else None)
            if place is None:
                return None
            store, *others = stores
            read = self.under_way[key] = StoreRead(key, place, store, self._read(store, key, place), others)
        elif read.store.is_stuck:
            return Fetch(key, True)
        fetch = Fetch(key)
        read.waiting.append(fetch)
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Ends a load's interest in an entry that it waits for, or that passes."""
        if fetch.place is not None:
            assert isinstance(fetch.place, PassingPlace)
            fetch.place.users -= 1
            self.passed.append(fetch.key.block.digest)
            self._free(fetch.place)
        elif not fetch.done:
            self.under_way[fetch.key].waiting.remove(fetch)

    def forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """No load gets an entry with such a key that is on its way past host memory. Host memory forgets the others."""
        for key, read in self.under_way.items():
            if isinstance(read.place, PassingPlace) and matches(key):
                read.place.is_forgotten = True

    def measured(self, store: StoreQueue) -> StoreCounters:
        """The store's totals, with what was read here."""
        speed = self._speeds[store.name]
        return replace(store.counters, reads=speed.total, read_s=speed.total_s)

    def take_passed(self) -> list[bytes]:
        """Digests of the entries that have passed since the last call."""
        passed, self.passed = self.passed, []
        return passed

    def step(self) -> bool:
        """Takes the answers of the stores. Returns whether there was one."""
        reads = [read for read in self.under_way.values() if read.answer.done()]
        for read in reads:
            self._advance(read)
        return bool(reads)

    def _is_faster(self, store: StoreQueue, entry_s: float) -> bool:
        measured_s = self._speeds[store.name].entry_s(self._clock())
        return measured_s is None or measured_s < entry_s

    def _read(self, store: StoreQueue, key: EntryKey, place: HostPlace | PassingPlace) -> Future[bool]:
        self._speeds[store.name].begun(self._clock())
        return store.get(key, place.memory)

    def _advance(self, read: StoreRead) -> None:
        place, is_dropped = read.place, read.place.is_forgotten
        self._speeds[read.store.name].ended(self._clock(), is_found=read.answer.result())
        found = read.answer.result() and not is_dropped
        if not found and read.others and not is_dropped:
            read.store = read.others.pop(0)
            read.answer = self._read(read.store, read.key, place)
            return
        del self.under_way[read.key]
        if isinstance(place, HostPlace):
            end = self._host.commit if found else self._host.abandon
            end(place)
            if found and not read.store.knows(read.key.block.digest):
                self._write(read.key)
        for fetch in read.waiting:
            fetch.done = True
            fetch.source = read.store.name
            if found and isinstance(place, HostPlace):
                fetch.place = self._host.pin(read.key)
            elif found and isinstance(place, PassingPlace):
                place.users += 1
                fetch.place = place
        self._free(place)

    def _free(self, place: HostPlace | PassingPlace) -> None:
        if isinstance(place, PassingPlace) and not place.users:
            place.is_forgotten = False
            self.passing.append(place)
