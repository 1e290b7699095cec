"""The entries of one rank's cache: copies them to host memory and back, checked. Used by the transfer thread only.

save:  cache ──gather, digest──► slot ──► host memory ··► stores below, written behind
load:  stores below ··► host memory ──► slot ──check digest──► scatter ──► cache
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from baton.core.errors import BatonError
from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, Sources, StoreChanges
from kvtransfer.movers.mover import SAVED_AT_ONCE, Mover
from kvtransfer.offload_jobs import OffloadJob
from kvtransfer.offload_load import Load
from kvtransfer.offload_save import Save
from kvtransfer.offload_tiers import EntryTiers

J = TypeVar("J", bound=OffloadJob)

SLOTS = 4
# On a GPU each slot of a save has several messages, so that copies go on while the host looks at the slots.
_SLOTS_OF_SAVES = 2
# Bytes of them. A step's results may wait as long for the copies of two slots: 2.5 ms at 54 GB/s. Most saves are less,
# and begin when a step has ended.
_SAVED_BYTES = 64 << 20


class Offloader:
    """Saves and loads entries of one cache, several messages at a time. The thread calls `step` repeatedly.

    Args:
        mover: of the cache.
        tiers: open.
        clock: monotonic seconds.
    """

    def __init__(self, mover: Mover, tiers: EntryTiers, clock: Callable[[], float]) -> None:
        self._mover = mover
        self._tiers = tiers
        self._clock = clock
        # Made now: on a GPU, an allocation would pause the engine later.
        self._pool = mover.open_pool(slot_bytes=tiers.layout.message_bytes, slots=SLOTS, through_host=False)
        self._has_ended = False  # a save or a load has ended in the last step
        self._saves: list[Save] = []
        self._loads: list[Load] = []
        # The host begins the copies of a GPU, so several at a time cost fewer turns. A CPU copies in the turn itself.
        self._saved_at_once = _at_once(tiers.layout.message_bytes) if mover.on_gpu else 1
        self._slots_of_saves = _SLOTS_OF_SAVES if mover.on_gpu else SLOTS

    @property
    def in_flight(self) -> int:
        """How many calls have not ended."""
        return len(self._saves) + len(self._loads) + self._tiers.calls_waiting

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for a call that has not ended. None waits for a save."""
        return bool(self._loads) or self._tiers.calls_waiting > 0

    def save(self, saves: Sequence[EntryBlocks], future: "Future[tuple[int, ...]]") -> None:
        """The future gets for each sequence the number of leading entries that host memory has then, when nothing reads
        the blocks any more."""
        try:
            save = Save(saves, future, self._mover, self._tiers, at_once=self._saved_at_once)
        except BatonError as error:
            future.set_exception(error)
        else:
            self._saves.append(save)

    def load(self, entries: EntryBlocks, timeout_s: float, entry_s: float, future: "Future[Sources]") -> None:
        """The future gets the sources of the leading entries that are in the blocks, whole and checked, when nothing
        writes to the blocks any more.

        Args:
            entry_s: see `RankTransfer.load_entries`.
        """
        end_s = self._clock() + timeout_s
        try:
            self._loads.append(Load(entries, end_s, entry_s, future, self._mover, self._tiers, self._clock))
        except BatonError as error:
            future.set_exception(error)

    def stop(self, job: "Future[Any]") -> None:
        """Ends the saves or the load of that future, if they are still there. The future is then done soon."""
        for each in self._jobs:
            if each.future is job:
                each.stop()

    def find(self, keys: tuple[EntryKey, ...], future: "Future[int]") -> None:
        self._tiers.find(keys, future)

    def find_state(self, after: tuple[EntryKey, ...], future: "Future[int]") -> None:
        """The future gets the number of these entries up to the last one after which there is a state, or 0."""
        position = Future[int]()
        position.add_done_callback(lambda done: future.set_result(len(after) - done.result()))
        self._tiers.find_first(tuple(map(self._tiers.layout.last_state_key, reversed(after))), position)

    def keep(
        self, keys: tuple[EntryKey, ...], keep: KeepTime, future: "Future[None]", *, with_state: bool = False
    ) -> None:
        """Keeps entries, and if wanted the state after the last one, for a time."""
        self._tiers.keep(keys, keep)
        if with_state:
            self._tiers.keep(self._tiers.layout.state_keys(keys[-1]), keep)
        future.set_result(None)

    def drop(self, keys: tuple[EntryKey, ...], future: "Future[None]") -> None:
        """Forgets entries, and the states after them."""
        states = (piece for key in keys for piece in self._tiers.layout.state_keys(key))
        dropped = tuple(dict.fromkeys((*keys, *states)))
        self._forget(frozenset(dropped).__contains__)
        self._tiers.drop(dropped, future)

    def drop_roots(self, roots: frozenset[bytes], future: "Future[DroppedEntries]") -> None:
        self._forget(lambda key: key.root in roots)
        self._tiers.drop_roots(roots, future)

    def step(self) -> bool:
        """Advances messages in flight and begins at most one more, or several saves. Returns whether anything
        happened."""
        moved = self._tiers.step()
        self._has_ended = False
        if not self._saves and not self._loads:
            return moved
        for job in self._jobs:
            for slot in job.advance():
                self._pool.give_back(slot)
                moved = True
        # A CPU copies in the turn itself.
        most = _SLOTS_OF_SAVES if self._mover.on_gpu and not self._loads else 1
        while most and self._begin_one():
            most -= 1
            moved = True
        self._has_ended = self._finish_jobs()
        return self._has_ended or moved

    def take_changes(self) -> StoreChanges | None:
        """What has changed in the stores since the last call. Returns None if nothing has.

        What leaves while entries are saved is reported when a save has ended, because each report wakes the event loop.
        """
        return None if self._saves and not self._has_ended else self._tiers.take_changes()

    def close(self) -> None:
        """Begins nothing more. Call `step` until nothing is in flight."""
        for job in self._jobs:
            job.stop()
        self._tiers.stop_waiting()

    @property
    def _jobs(self) -> list[OffloadJob]:
        return [*self._loads, *self._saves]

    def _forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """Neither saves nor loads entries that are dropped."""
        for job in self._jobs:
            job.forget(matches)

    def _begin_one(self) -> bool:
        """Begins a message of the first job that can, of each kind in turn. Loads go first, because a request waits for
        them, but saves always have a slot, because they keep blocks from being freed."""
        if not self._pool.available:
            return False
        saving = sum(job.in_flight for job in self._saves)
        last_is_kept = self._pool.available == 1 and self._saves and not saving
        job: OffloadJob | None = None if last_is_kept else _next(self._loads)
        if job is None and saving < self._slots_of_saves:
            job = _next(self._saves)
        if job is None:
            return False
        slot = self._pool.take()
        assert slot is not None
        if not job.begin(slot):
            self._pool.give_back(slot)
        return True

    def _finish_jobs(self) -> bool:
        over = [job for job in self._jobs if job.is_over]
        if over:
            self._loads = [job for job in self._loads if job not in over]
            self._saves = [job for job in self._saves if job not in over]
        for job in over:
            job.finish()
        return bool(over)


def _at_once(message_bytes: int) -> int:
    """How many messages of that size go through a slot together."""
    return max(1, min(SAVED_AT_ONCE, _SAVED_BYTES // message_bytes))


def _next(jobs: list[J]) -> J | None:
    """The first job that can begin a message, which takes its turn after the others from now on."""
    job = next((job for job in jobs if job.ready()), None)
    if job is not None:
        jobs.remove(job)
        jobs.append(job)
    return job
