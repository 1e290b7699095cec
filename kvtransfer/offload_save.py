"""A save of the entries of some sequences, message by message: when each may begin, and what its end means."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.core.errors import BatonError
from baton.core.kv_entries import EntryBlocks, EntryKey
from kvtransfer.movers.mover import Blocks, Mover, SavedPayload, Saving
from kvtransfer.offload_jobs import Piece, num_whole, pieces_of, slot_of
from kvtransfer.offload_tiers import EntryTiers
from kvtransfer.staging import Slot
from kvtransfer.stores.entry import EntryMessage
from kvtransfer.stores.host_memory import HostPlace


@dataclass(eq=False, slots=True)
class _Sequence:
    """One sequence of a save.

    Attributes:
        left: pieces that have no place yet and may need one.
    """

    blocks: Blocks
    pieces: tuple[Piece, ...]
    num_entries: int
    left: deque[Piece]


@dataclass(eq=False, slots=True)
class _Saved:
    """An entry while its messages are copied to host memory.

    Attributes:
        messages: that have not begun.
        in_flight: how many of its messages have begun and are not over.
    """

    place: HostPlace
    blocks: Blocks
    messages: deque[EntryMessage]
    in_flight: int = 0


@dataclass(eq=False, slots=True)
class _Copying:
    """Messages that the mover copies through one slot."""

    slot: Slot
    messages: list[tuple[_Saved, EntryMessage]]
    copy: Saving


class Save:
    """Copies entries from the cache to host memory, unless they are there.

    Args:
        future: gets for each sequence how many of its first entries host memory has then, a state as one more.
        at_once: how many messages go through a slot together.

    Raises:
        BatonError: the cache has no such blocks.
    """

    def __init__(
        self,
        saves: Sequence[EntryBlocks],
        future: "Future[tuple[int, ...]]",
        mover: Mover,
        tiers: EntryTiers,
        *,
        at_once: int,
    ) -> None:
        self.future = future
        self._mover = mover
        self._tiers = tiers
        self._layout = tiers.layout
        self._at_once = at_once
        self._sequences: list[_Sequence] = []
        try:
            for entries in saves:
                blocks = mover.place(entries.block_ids, incoming=False, state_slot=slot_of(entries))
                pieces = pieces_of(entries.keys, entries.state_after, tiers.layout)
                self._sequences.append(_Sequence(blocks, pieces, len(entries.keys), deque(pieces)))
        except BatonError:
            self._free_blocks()
            raise
        self._waiting = deque(self._sequences)  # those that have pieces left
        self._entry: _Saved | None = None
        self._copying: list[_Copying] = []
        self._error: BatonError | None = None

    @property
    def in_flight(self) -> int:
        return len(self._copying)

    @property
    def is_over(self) -> bool:
        return not self._copying and not self._waiting and self._entry is None

    def ready(self) -> bool:
        return self._entry is not None or self._take(gives_up=not self._copying)

    def begin(self, slot: Slot) -> bool:
        begun: list[tuple[_Saved, EntryMessage]] = []
        payloads: list[SavedPayload] = []
        while len(begun) < self._at_once and (self._entry is not None or self._take(gives_up=False)):
            entry = self._entry
            assert entry is not None
            message = entry.messages.popleft()
            entry.in_flight += 1
            begun.append((entry, message))
            place, start = entry.place, message.start
            to = place.memory[start : start + message.payload_bytes]
            payloads.append(SavedPayload(entry.blocks, message.place(place.key), to, place.address + start))
            if not entry.messages:
                self._entry = None
        try:
            self._copying.append(_Copying(slot, begun, self._mover.save(slot, payloads)))
        except BatonError as error:
            self._error = error
            for entry, message in begun:
                entry.messages.append(message)  # it never comes
            self.stop()
            self._end(begun)
            return False
        return True

    def advance(self) -> list[Slot]:
        over = [copying for copying in self._copying if copying.copy.done]
        for copying in over:
            self._copying.remove(copying)
            for (entry, message), digest in zip(copying.messages, copying.copy.digests, strict=True):
                self._layout.seal(entry.place.memory, entry.place.key, message, digest)
            self._end(copying.messages)
        return [copying.slot for copying in over]

    def stop(self) -> None:
        self._waiting.clear()
        if self._entry is not None:
            entry, self._entry = self._entry, None
            if not entry.in_flight:
                self._tiers.abandon(entry.place)

    def finish(self) -> None:
        self._free_blocks()
        if self._error is not None:
            self.future.set_exception(self._error)
        else:
            self.future.set_result(tuple(map(self._num_saved, self._sequences)))

    def forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """Begins no entry with such a key. Host memory forgets those that have begun."""
        for sequence in self._waiting:
            sequence.left = deque(piece for piece in sequence.left if not matches(piece[0]))

    def _take(self, *, gives_up: bool) -> bool:
        """Takes a place for the next entry that host memory lacks. Returns whether there is one.

        Args:
            gives_up: leaves the rest of a sequence out that finds no place now.
        """
        while self._waiting:
            sequence = self._waiting[0]
            while sequence.left:
                key, messages = sequence.left[0]
                if self._tiers.has(key):
                    sequence.left.popleft()
                    continue
                place = self._tiers.take(key)
                if place is None:
                    if not gives_up:
                        return False
                    # Others hold all places, maybe for long, and the blocks are needed.
                    self._tiers.no_room(len(sequence.left))
                    break
                sequence.left.popleft()
                self._entry = _Saved(place, sequence.blocks, deque(messages))
                return True
            self._waiting.popleft()
        return False

    def _end(self, messages: Sequence[tuple[_Saved, EntryMessage]]) -> None:
        """Keeps the entries that are complete by these messages. Gives the places of those back whose rest never
        comes."""
        for entry, _ in messages:
            entry.in_flight -= 1
            if entry.in_flight or entry is self._entry:
                continue
            if entry.messages:
                self._tiers.abandon(entry.place)
            else:
                self._tiers.commit(entry.place)

    def _num_saved(self, sequence: _Sequence) -> int:
        pieces = sequence.pieces
        lacking = (number for number, (key, _) in enumerate(pieces) if not self._tiers.has(key))
        return num_whole(next(lacking, len(pieces)), sequence.num_entries, len(pieces))

    def _free_blocks(self) -> None:
        for sequence in self._sequences:
            sequence.blocks.free()
