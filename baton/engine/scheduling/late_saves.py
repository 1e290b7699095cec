"""Entries that wait in the cache, and are saved only when their blocks will soon be taken. Pure.

Host memory that is smaller than the cache would otherwise hold copies of what the cache has.
"""

from collections.abc import Iterable, Iterator, Sequence

from baton.core.block_keys import KeyChain
from baton.core.kv_entries import ENTRY_TOKENS, EntryKey
from baton.engine.request import IntArray
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state import RequestState
from baton.engine.scheduling.unsaved_entries import UnsavedEntries

# Entries are saved from the free blocks that are taken next: so many times as many as one request has taken lately, but
# at least and at most these shares of a pool. More of them wait for their copies when many requests come at once; with
# more, host memory has more that the cache has too.
_REQUESTS = 4
_OLDEST_SHARES = 1 / 32, 1 / 4
# How much a long request counts after one turn. There are at most 20 turns a second: half of it is left after 35 s.
_LATELY = 0.999
# Longer sequences do not wait, because two of them would take more blocks than that at once.
_WAITING_SHARE = 1 / 8
# In smaller pools nothing waits.
_POOL_TOKENS_MIN = 1 << 15
# Entries that are saved together, as of a running request; more only where many are due. A long prompt lets thousands
# be due at once, and a step's results would wait for their copies.
_AT_ONCE = 16
_TURNS = 4


class LateSaves:
    """The entries that wait.

    Args:
        kept: knows the blocks of entries that no store has.

    Attributes:
        most_tokens: length of the longest sequence that waits.
    """

    def __init__(self, pools: Sequence[BlockManager], kept: KeptBlocks, *, block_size: int) -> None:
        self._pools = pools
        self._kept = kept
        self._waiting: tuple[dict[bytes, EntryKey], ...] = tuple({} for _ in pools)  # by the last block of each
        self._blocks_at_once = _AT_ONCE * ENTRY_TOKENS // block_size
        self._most_entries = max(pool.num_blocks for pool in pools) * block_size // ENTRY_TOKENS
        self.most_tokens = int(min(pool.num_blocks for pool in pools) * _WAITING_SHARE) * block_size
        self._most_taken = [pool.num_blocks * _WAITING_SHARE / _REQUESTS for pool in pools]
        for number in range(len(pools)):
            self._watch(number)

    @staticmethod
    def suits(pools: Iterable[BlockManager], *, block_size: int) -> bool:
        """Whether entries may wait in these pools: they are large, and each block belongs to one entry."""
        return not ENTRY_TOKENS % block_size and all(pool.num_blocks * block_size >= _POOL_TOKENS_MIN for pool in pools)

    def add(self, entries: Sequence[EntryKey], keys: KeyChain, tokens: IntArray, *, pool: int) -> None:
        """Lets these entries of a sequence wait; `keys` are those of its blocks."""
        waiting = self._waiting[pool]
        for entry in self._kept.computed(entries, keys, tokens):
            waiting[self._kept.blocks_of_lost(entry)[-1].digest] = entry
        while len(waiting) > self._most_entries:  # the cache has lost some of them
            del waiting[next(iter(waiting))]

    def _watch(self, number: int) -> None:
        pool = self._pools[number]
        most = self._most_taken[number] = max(pool.take_most_taken(), self._most_taken[number] * _LATELY)
        least, largest = (share * pool.num_blocks for share in _OLDEST_SHARES)
        pool.watch_oldest(int(min(max(_REQUESTS * most, least), largest)))

    def first_of(self, state: RequestState, unsaved: UnsavedEntries) -> int:
        """The first of a request's entries before those to offer that waits; the first to offer if none does."""
        waiting, stop = self._waiting[state.pool], state.num_offered
        return next((index for index in range(stop) if unsaved.last_block(state, index) in waiting), stop)

    @property
    def has_due(self) -> bool:
        """Whether blocks that will soon be taken have not been looked at."""
        return any(pool.aged for pool in self._pools)

    def take_due(self, pool: int) -> Iterator[list[EntryKey]]:
        """Runs of consecutive entries of a pool whose blocks will soon be taken, some at a time."""
        self._watch(pool)
        waiting = self._waiting[pool]
        due = dict[bytes, EntryKey]()
        aged = len(self._pools[pool].aged)
        for key in self._pools[pool].take_aged(max(self._blocks_at_once, aged // _TURNS)):
            entry = waiting.pop(key.digest, None)
            if entry is not None and not self._kept.has(entry):
                due[entry.block.digest] = entry
        after = {entry.block.parent: entry for entry in due.values()}
        for entry in due.values():
            if entry.block.parent in due and after[entry.block.parent] is entry:
                continue  # a run has it
            run = [entry]
            while (following := after.get(run[-1].block.digest)) is not None:
                run.append(following)
            yield run
