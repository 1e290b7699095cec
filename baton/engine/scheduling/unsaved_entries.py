"""Entries that were not offered to the stores, though the cache has, or had, their blocks. Pure."""

from collections.abc import Iterable

from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.pools import blocks_for
from baton.engine.scheduling.state import RequestState


class UnsavedEntries:
    """The latest ones, by the blocks with their last tokens. These have keys already, and entries must be hashed.

    Args:
        most: of them, as many as fit into the cache, because it has lost the others.
    """

    def __init__(self, most: int, block_size: int) -> None:
        self._most = most
        self._block_size = block_size
        self._last_blocks: dict[bytes, None] = {}  # the oldest first

    def last_block(self, state: RequestState, index: int) -> bytes:
        """The digest of the block with the last token of an entry of a sequence."""
        last = blocks_for((index + 1) * ENTRY_TOKENS, self._block_size) - 1
        return state.keys.key(last, state.tokens).digest

    def add(self, state: RequestState, first: int, stop: int) -> None:
        """Remembers entries of a sequence."""
        self._last_blocks |= dict.fromkeys(self.last_block(state, index) for index in range(first, stop))
        while len(self._last_blocks) > self._most:
            del self._last_blocks[next(iter(self._last_blocks))]

    def first_of(self, state: RequestState, stop: int) -> int:
        """The first of the entries before `stop` of a sequence that is one of these; `stop` if none is."""
        if not self._last_blocks:
            return stop
        return next((index for index in range(stop) if self.last_block(state, index) in self._last_blocks), stop)

    def offered(self, last_blocks: Iterable[bytes]) -> None:
        """These entries are offered now."""
        for digest in last_blocks if self._last_blocks else ():
            self._last_blocks.pop(digest, None)
