"""What an engine needs of the stores outside of its cache, and of other nodes. Others implement it, and the engine does
not know them.
"""

from typing import Protocol

from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, KeptPrefix, Sources


class PrefixTier(Protocol):
    """Copies entries between the cache and the stores of all ranks. Every answer may be less than was asked for.

    All methods belong to the event loop. Each raises BatonError only if the node ends.

    Attributes:
        has_stores: there may be entries that this node has not saved, in files or in a store of several nodes.
    """

    has_stores: bool

    async def save_entries(self, *saves: EntryBlocks) -> tuple[int, ...]:
        """Copies entries of some sequences to the stores. Returns for each how many of the first ones they have then; a
        state counts as one more. Until it returns nothing may write to their blocks or to the state."""
        ...

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        """How many of the first keys the stores have, on every rank or on the owner."""
        ...

    async def find_state(self, after: tuple[EntryKey, ...]) -> int:
        """The number of these entries up to the last one after which the stores have the recurrent state; 0: there is
        none."""
        ...

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float, entry_s: float) -> Sources:
        """Copies entries to their blocks. Returns where each of the first ones came from, as far as they are there; a
        state counts as one more.
        Nothing writes to them any more when it returns or raises, and it does so soon after the time limit.

        Args:
            entry_s: seconds to compute what is loaded, for each entry; a state alone counts as one. Stores that have
                taken longer lately are not read.
        """
        ...

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime, *, with_state: bool = False) -> None:
        """Keeps the first entries of a sequence for a time, or lets them leave first; maybe with the recurrent state
        after the last one."""
        ...

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        """Forgets entries."""
        ...

    async def drop_entries_of(self, roots: frozenset[bytes]) -> DroppedEntries:
        """Forgets every entry with one of these roots, also those that are being saved or loaded."""
        ...


class PrefixSource(Protocol):
    """Copies entries of other nodes to this node's stores. All methods belong to the event loop."""

    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None) -> int:
        """Copies entries from the node that has them, unless computing them is faster, for every rank or the owner.
        Returns how many of the first ones the stores have then. It never raises, and ends within a bound."""
        ...

    async def pull_state(
        self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, held: int, every: int, resumed: int
    ) -> int:
        """Copies a recurrent state from the node that has it, with the entries before it that are lacking here, unless
        computing is faster: the last state after one of these entries. Returns how many of them are before the state,
        if stores have all of it then; else 0. It never raises, and ends within a bound.

        Args:
            held: how many of the first entries the stores have here, or the cache.
            every: states are of use only after every so many entries of the sequence.
            resumed: tokens of the sequence that need not be computed in any case.
        """
        ...
