"""A save of one sequence's entries, message by message: when each may begin, and what its end means."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.kv_entries import EntryBlocks, EntryKey
from kvtransfer.movers.mover import Mover, Pending
from kvtransfer.offload_jobs import num_whole, pieces_of, slot_of
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.staging import Slot
from kvtransfer.stores.entry import EntryMessage
from kvtransfer.stores.host_memory import HostPlace


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
        self._blocks = mover.place(entries.block_ids, incoming=False, state_slot=slot_of(entries))
        self._all = pieces_of(entries.keys, entries.state_after, tiers.layout)
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
            self.future.set_result(num_whole(next(lacking, len(self._all)), self._num_entries, len(self._all)))

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
