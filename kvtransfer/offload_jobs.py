"""What a save and a load of entries have in common, as `Offloader` sees it.

`Offloader` owns the slots and calls both alike: `ready`, `begin` in a slot, `advance` until `is_over`, `finish`.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from baton.core.kv_entries import EntryBlocks, EntryKey
from kvtransfer.staging import Slot
from kvtransfer.stores.entry import EntryLayout, EntryMessage

# An entry, or a piece of a state, and its messages.
Piece = tuple[EntryKey, tuple[EntryMessage, ...]]


class OffloadJob(Protocol):
    """A save or a load. Its future is done once none of its messages is in a slot."""

    @property
    def future(self) -> Future[Any]: ...

    def ready(self) -> bool:
        """Whether a message can begin now."""
        ...

    def begin(self, slot: Slot) -> bool:
        """Begins a message in a slot, or several one after another. Returns False if an error has ended the job
        instead."""
        ...

    def advance(self) -> list[Slot]:
        """Advances messages as far as possible without waiting. Returns the slots of messages that are over."""
        ...

    def stop(self) -> None:
        """Begins nothing more."""
        ...

    def forget(self, matches: Callable[[EntryKey], bool]) -> None:
        """Saves or loads no entry with such a key, because it is dropped."""
        ...

    @property
    def in_flight(self) -> int:
        """How many slots it has."""
        ...

    @property
    def is_over(self) -> bool: ...

    def finish(self) -> None:
        """Gives everything back and completes the future."""
        ...


def pieces_of(keys: Sequence[EntryKey], after: EntryKey | None, layout: EntryLayout) -> tuple[Piece, ...]:
    """The entries, then the pieces of the state after one of them, if there is one."""
    pieces: list[Piece] = [(key, layout.messages) for key in keys]
    if after is not None:
        state = layout.state_keys(after)
        pieces += [(key, (message,)) for key, message in zip(state, layout.pieces, strict=True)]
    return tuple(pieces)


def slot_of(entries: EntryBlocks) -> int:
    return -1 if entries.state is None else entries.state.slot


def num_whole(pieces: int, num_entries: int, num_pieces: int) -> int:
    """The number of entries, and of states after them, that so many leading pieces make."""
    has_state = pieces == num_pieces > num_entries
    return min(pieces, num_entries) + has_state
