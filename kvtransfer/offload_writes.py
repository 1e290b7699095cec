"""Entries on their way from host memory to the stores below it, which are written behind their saves."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from baton.core.kv_entries import EntryKey
from kvtransfer.offload_queue import StoreQueue
from kvtransfer.stores.host_memory import HostMemory, HostPlace


class StoreWrites:
    """The writes that have not ended. Their entries stay in host memory until then.

    Args:
        most: how many may wait for one store. Further entries are not written.

    Attributes:
        refused: how many entries were not written.
        ended: writes that have ended, and their places; `step` takes them.
    """

    def __init__(self, host: HostMemory, stores: Sequence[StoreQueue], *, most: int) -> None:
        self.refused = 0
        self.ended: deque[tuple[StoreQueue, HostPlace]] = deque()
        self._host = host
        self._stores = stores
        self._most = most

    def begin(self, key: EntryKey) -> None:
        """Writes an entry of host memory to all stores."""
        for store in self._stores:
            place = self._host.pin(key) if store.writes_pending < self._most else None
            if place is None:
                self.refused += 1
                continue
            store.writes_pending += 1
            # Hundreds may wait, so they are not polled: the store's thread says which one has ended.
            answer = store.put(key, place.memory)
            answer.add_done_callback(partial(self._end, store, place))

    def step(self) -> bool:
        """Takes the answers of the stores. Returns whether there was one."""
        is_written = bool(self.ended)
        while self.ended:
            store, place = self.ended.popleft()
            store.writes_pending -= 1
            self._host.unpin(place)
        return is_written

    def _end(self, store: StoreQueue, place: HostPlace, _: Future[bool]) -> None:
        """Runs on the store's thread."""
        self.ended.append((store, place))
