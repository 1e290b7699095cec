"""What an engine needs of the stores outside of its cache, and of other nodes. Others implement it, and the engine does
not know them.
"""

from typing import Protocol

from baton.core.kv_entries import DroppedEntries, EntryBlocks, EntryKey, KeepTime, KeptPrefix


class PrefixTier(Protocol):
    """Copies entries between the cache and the stores of all ranks. Every answer may be less than was asked for.

    All methods belong to the event loop. Each raises BatonError only if the node ends.
    """

    async def save_entries(self, entries: EntryBlocks) -> int:
        """Copies entries to the stores. Returns how many of the first ones they have then. Until it returns nothing may
        write to their blocks."""
        ...

    async def find_entries(self, keys: tuple[EntryKey, ...], *, owner: int | None) -> int:
        """How many of the first keys the stores have, on every rank or on the owner."""
        ...

    async def load_entries(self, entries: EntryBlocks, *, timeout_s: float) -> int:
        """Copies entries to their blocks. Returns how many of the first ones are there. Nothing writes to the blocks
        any more when it returns or raises, and it does so soon after the time limit."""
        ...

    async def keep_entries(self, keys: tuple[EntryKey, ...], keep: KeepTime) -> None:
        """Keeps the first entries of a sequence for a time, or lets them leave first."""
        ...

    async def drop_entries(self, keys: tuple[EntryKey, ...]) -> None:
        """Forgets entries."""
        ...

    async def drop_entries_of(self, root: bytes) -> DroppedEntries:
        """Forgets every entry with this root, also those that are being saved or loaded."""
        ...


class PrefixSource(Protocol):
    """Copies entries of other nodes to this node's stores. All methods belong to the event loop."""

    async def pull(self, keys: tuple[EntryKey, ...], kept: KeptPrefix, *, owner: int | None) -> int:
        """Copies entries from the node that has them, unless computing them is faster, for every rank or the owner.
        Returns how many of the first ones the stores have then. It never raises, and ends within a bound."""
        ...
