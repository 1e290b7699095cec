"""A save and a load of one sequence's entries, message by message: when each may begin, and what its end means.

`Offloader` owns the slots and calls both alike: `ready`, `begin` in a slot, `advance` until `is_over`, `finish`.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from baton.core.errors import BatonError
from baton.core.kv_entries import EntryBlocks, EntryKey
from kvtransfer.movers.mover import CacheReading, Mover, Pending
from kvtransfer.offload_tiers import EntryTiers, Fetch
from kvtransfer.staging import Slot
from kvtransfer.stores.entry import EntryLayout, EntryMessage
from kvtransfer.stores.host_memory import HostPlace

# Entries that a load has found, or that stores read for it, before it begins them.
READ_AHEAD = 8


# An entry, or a piece of a state, and its messages.
_Piece = tuple[EntryKey, tuple[EntryMessage, ...]]


class OffloadJob(Protocol):
    """A save or a load. Its future gets a number of entries once none of its messages is in a slot. A state counts as
    one more, if all of its pieces do."""

    future: Future[int]

    def ready(self) -> bool:
        """Whether a message can begin now."""
        ...

    def begin(self, slot: Slot) -> bool:
        """Begins a message in a slot. Returns False if an error has ended the job instead."""
        ...

    def advance(self) -> list[Slot]:
        """Advances messages as far as possible without waiting. Returns the slots of messages that are over."""
        ...

    def stop(self) -> None:
        """Begins nothing more."""
        ...

    @property
    def in_flight(self) -> int:
        """How many messages are in slots."""
        ...

    @property
    def is_over(self) -> bool: ...

    def finish(self) -> None:
        """Gives everything back and completes the future."""
        ...


@dataclass(eq=False)
class _Saved:
    """An entry while its messages are copied to host memory.

    Attributes:
        messages: that have not begun.
    """

    place: HostPlace
    messages: deque[EntryMessage]
    in_flight: int = 0


@dataclass(eq=False)
class _SaveMessage:
    entry: _Saved
    slot: Slot
    copy: Pending


class Save:
    """Copies entries from the cache to host memory, unless they are there."""

    def __init__(self, entries: EntryBlocks, future: "Future[int]", mover: Mover, tiers: EntryTiers) -> None:
        self.future = future
        self._mover = mover
        self._tiers = tiers
        self._layout = tiers.layout
        self._blocks = mover.place(entries.block_ids, incoming=False, state_slot=_slot_of(entries))
        self._all = _pieces_of(entries, tiers.layout)
        self._left = deque(self._all)
        self._num_entries = len(entries.keys)
        self._entry: _Saved | None = None
        self._messages: list[_SaveMessage] = []
        self._error: BatonError | None = None

    @property
    def in_flight(self) -> int:
        return len(self._messages)

    @property
    def is_over(self) -> bool:
        return not self._messages and not self._left and self._entry is None

    def ready(self) -> bool:
        while self._entry is None and self._left:
            key, messages = self._left[0]
            if self._tiers.has(key):
                self._left.popleft()
                continue
            place = self._tiers.take(key)
            if place is None:
                if not self._messages:  # others hold all places, maybe for long, and the blocks are needed
                    self._tiers.no_room(len(self._left))
                    self._left.clear()
                return False
            self._left.popleft()
            self._entry = _Saved(place, deque(messages))
        return self._entry is not None

    def begin(self, slot: Slot) -> bool:
        entry = self._entry
        assert entry is not None
        message = entry.messages[0]
        segment = self._layout.segment(entry.place.key, message)
        start, size = message.start, message.size
        try:
            self._mover.gather(slot, self._blocks, segment, message.part.place(segment), with_digest=True)
            copy = self._mover.copy_out(slot, size, entry.place.tensor[start : start + size])
        except BatonError as error:
            self._error = error
            self.stop()
            return False
        entry.messages.popleft()
        entry.in_flight += 1
        self._messages.append(_SaveMessage(entry, slot, copy))
        if not entry.messages:
            self._entry = None
        return True

    def advance(self) -> list[Slot]:
        over = [message for message in self._messages if message.copy.done]
        for message in over:
            self._messages.remove(message)
            message.entry.in_flight -= 1
            self._end(message.entry)
        return [message.slot for message in over]

    def stop(self) -> None:
        self._left.clear()
        if self._entry is not None:
            entry, self._entry = self._entry, None
            self._end(entry)

    def finish(self) -> None:
        self._blocks.free()
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            lacking = (number for number, (key, _) in enumerate(self._all) if not self._tiers.has(key))
            self.future.set_result(_whole(next(lacking, len(self._all)), self._num_entries, len(self._all)))

    def forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """Begins no entry with such a key. Host memory forgets those that have begun."""
        self._left = deque(piece for piece in self._left if not matches(piece[0]))

    def _end(self, entry: _Saved) -> None:
        """Keeps an entry if all of it is there, or gives its place back if the rest of it never comes."""
        if entry.in_flight or entry is self._entry:
            return
        if entry.messages:
            self._tiers.abandon(entry.place)
        else:
            self._tiers.commit(entry.place)


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

    Attributes:
        root: of its entries.
    """

    def __init__(
        self,
        entries: EntryBlocks,
        end_s: float,
        future: "Future[int]",
        mover: Mover,
        tiers: EntryTiers,
        clock: Callable[[], float],
    ) -> None:
        self.future = future
        self._mover = mover
        self._tiers = tiers
        self._layout = tiers.layout
        self._clock = clock
        self._all = _pieces_of(entries, tiers.layout)
        self._num_entries = len(entries.keys)
        self.root = entries.root
        self._blocks = mover.place(entries.block_ids, incoming=True, state_slot=_slot_of(entries))
        self._end_s = end_s
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
            self._tiers.missing()
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
        self.future.set_result(_whole(count, self._num_entries, len(self._all)))

    def _look_ahead(self) -> None:
        while len(self._ahead) < READ_AHEAD and self._begun + len(self._ahead) < self._stop:
            fetch = self._tiers.fetch(self._all[self._begun + len(self._ahead)][0])
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
                self._tiers.damaged(entry.fetch)
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


def _pieces_of(entries: EntryBlocks, layout: EntryLayout) -> tuple[_Piece, ...]:
    """The entries, then the pieces of the state."""
    pieces: list[_Piece] = [(key, layout.messages) for key in entries.keys]
    if entries.state is not None:
        keys = layout.state_keys(entries.state.after)
        pieces += [(key, (message,)) for key, message in zip(keys, layout.pieces, strict=True)]
    return tuple(pieces)


def _slot_of(entries: EntryBlocks) -> int:
    return -1 if entries.state is None else entries.state.slot


def _whole(pieces: int, num_entries: int, num_pieces: int) -> int:
    """The number of entries, and of states after them, that so many leading pieces make."""
    has_state = pieces == num_pieces > num_entries
    return min(pieces, num_entries) + has_state
