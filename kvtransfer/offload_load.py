"""A load of one sequence's entries, message by message: when each may begin, and what its end means."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.kv_entries import EntryBlocks, EntryKey, Sources
from kvtransfer.movers.mover import CacheReading, Mover, Pending
from kvtransfer.offload_jobs import num_whole, pieces_of, slot_of
from kvtransfer.offload_reads import Fetch
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.staging import Slot
from kvtransfer.stores.entry import EntryMessage

# Entries that a load has found, or that stores read for it, before it begins them.
READ_AHEAD = 8


@dataclass(eq=False)
class _Loaded:
    """An entry while its messages are checked and scattered.

    Attributes:
        number: of the entry in the job.
        messages: that have not begun.
    """

    number: int
    fetch: Fetch
    messages: deque[EntryMessage]
    in_flight: int = 0


@dataclass(eq=False)
class _LoadMessage:
    """One message, while it holds a slot:

    reading ──► scatter ──► over          damaged messages, and those after the job's last entry, are not scattered
       └─────────────────► over
    """

    entry: _Loaded
    form: EntryMessage
    slot: Slot
    reading: CacheReading
    scatter: Pending | None = None


class Load:
    """Copies entries from host memory to the cache, each message after its check.

    Args:
        end_s: no entry begins from this time on.
        entry_s: seconds to compute what is loaded, for each entry. Stores that take longer are not read; the pieces of
            a state take their time too.
    """

    def __init__(
        self,
        entries: EntryBlocks,
        end_s: float,
        entry_s: float,
        future: "Future[Sources]",
        mover: Mover,
        tiers: EntryTiers,
        clock: Callable[[], float],
    ) -> None:
        self.future = future
        self._mover = mover
        self._tiers = tiers
        self._layout = tiers.layout
        self._clock = clock
        self._all = pieces_of(entries.keys, entries.state_after, tiers.layout)
        self._num_entries, self._state_after = len(entries.keys), entries.state_after
        self._blocks = mover.place(entries.block_ids, incoming=True, state_slot=slot_of(entries))
        self._end_s, self._entry_s = end_s, entry_s * max(1, self._num_entries) / max(1, len(self._all))
        # Entries from this one on are not loaded.
        self._stop = len(self._all)
        self._begun = 0
        self._ahead: deque[Fetch] = deque()
        self._entry: _Loaded | None = None
        self._messages: list[_LoadMessage] = []
        # The entries that are scattered whole, by their numbers.
        self._whole: dict[int, Fetch] = {}
        self._error: BatonError | None = None

    @property
    def in_flight(self) -> int:
        return len(self._messages)

    @property
    def is_over(self) -> bool:
        return not self._messages and self._entry is None and self._begun >= self._stop

    def ready(self) -> bool:
        if self._entry is not None:
            return True
        if self._begun < self._stop and self._clock() >= self._end_s:
            self._tiers.missing()
            self.stop()
        self._look_ahead()
        if not self._ahead or not self._ahead[0].done:
            return False
        fetch = self._ahead.popleft()
        if fetch.place is None:
            self._tiers.missing(fetch)
            self.stop()
            return False
        self._entry = _Loaded(self._begun, fetch, deque(self._all[self._begun][1]))
        self._begun += 1
        return True

    def begin(self, slot: Slot) -> bool:
        entry = self._entry
        assert entry is not None
        assert entry.fetch.place is not None
        message = entry.messages.popleft()
        start, size = message.start, message.size
        try:
            self._mover.copy_in(slot, size, entry.fetch.place.tensor[start : start + size])
            reading = self._mover.read(slot, size, with_digest=True, with_extremes=False)
        except BatonError as error:
            self._fail(entry, error)
            return False
        entry.in_flight += 1
        self._messages.append(_LoadMessage(entry, message, slot, reading))
        if not entry.messages:
            self._entry = None
        return True

    def advance(self) -> list[Slot]:
        over = [message for message in tuple(self._messages) if self._is_over(message)]
        for message in over:
            self._messages.remove(message)
            message.entry.in_flight -= 1
            self._end(message.entry)
        return [message.slot for message in over]

    def stop(self) -> None:
        self._stop_at(self._begun)

    def finish(self) -> None:
        self._blocks.free()
        if self._error is not None:
            self.future.set_exception(self._error)
            return
        count = next((number for number in range(self._stop) if number not in self._whole), self._stop)
        self._tiers.loaded(self._whole[number] for number in range(count))
        # A state is one more: its last piece stands for it.
        whole = num_whole(count, self._num_entries, len(self._all))
        numbers = [*range(min(count, self._num_entries)), count - 1][:whole]
        self.future.set_result(tuple(self._whole[number].source for number in numbers))

    def forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """Ends before the first entry with such a key, even if that entry is in the cache already."""
        first = next((number for number, (key, _) in enumerate(self._all) if matches(key)), None)
        if first is not None:
            self._stop_at(first)

    def _look_ahead(self) -> None:
        while len(self._ahead) < READ_AHEAD and self._begun + len(self._ahead) < self._stop:
            key, _ = self._all[self._begun + len(self._ahead)]
            fetch = self._tiers.fetch(key, entry_s=self._entry_s)
            if fetch is None:
                return
            self._ahead.append(fetch)

    def _is_over(self, message: _LoadMessage) -> bool:
        """Advances one message. Returns whether its slot is free."""
        entry = message.entry
        if message.scatter is None:
            if not message.reading.done:
                return False
            if entry.number >= self._stop:
                return True
            segment = self._layout.segment(entry.fetch.key, message.form)
            if message.reading.trailer != segment.encode(segment.digest_over(message.reading.digest)):
                is_entry = entry.number < self._num_entries
                self._tiers.damaged(entry.fetch, state_after=None if is_entry else self._state_after)
                self._stop_at(entry.number)
                return True
            try:
                place = message.form.part.place(segment)
                message.scatter = self._mover.scatter(message.slot, self._blocks, segment, place)
            except BatonError as error:
                self._fail(entry, error)
                return True
        return message.scatter.done

    def _fail(self, entry: _Loaded, error: BatonError) -> None:
        self._error = error
        self._stop_at(entry.number)

    def _stop_at(self, number: int) -> None:
        """Ends the job before that entry."""
        self._stop = min(self._stop, number)
        while self._ahead:
            self._tiers.release(self._ahead.popleft())
        if self._entry is not None and self._entry.number >= self._stop:
            entry, self._entry = self._entry, None
            self._end(entry)

    def _end(self, entry: _Loaded) -> None:
        """Ends an entry none of whose messages is in a slot or will be."""
        if entry.in_flight or entry is self._entry:
            return
        self._tiers.release(entry.fetch)
        if entry.number < self._stop:
            self._whole[entry.number] = entry.fetch
