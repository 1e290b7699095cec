"""The entries that a request's sequence has, those that it would be worth to load, and the plan of one load. Pure."""

from dataclasses import dataclass

from baton.core.block_keys import KeyChain
from baton.core.kv_entries import EntryBlocks, EntryKey
from baton.engine.request import IntArray


def entries_of(chain: KeyChain, tokens: IntArray, start: int, stop: int) -> tuple[EntryKey, ...]:
    """The keys of a sequence's entries [start, stop)."""
    root = chain.root
    return tuple([EntryKey(key, root, index) for index, key in enumerate(chain.run(start, stop, tokens), start)])


@dataclass(frozen=True)
class WantedPrefix:
    """The start of a request's sequence that would be worth to load.

    Attributes:
        tokens: the whole sequence; `keys` and `entry_keys` are its chains of blocks and of entries.
        starts: for each pool, the first entry that is not in the cache.
        stop: number of entries that the request can use.
        states: numbers of entries after which the recurrent state would be of use; only such a prefix is. Empty: the
            model has no states.
        known: those of them whose state the cache has, but not all of the KV before it.
        likely_pool: the pool that has most of the sequence, and of equal ones the one with most free blocks.
    """

    tokens: IntArray
    keys: KeyChain
    entry_keys: KeyChain
    starts: tuple[int, ...]
    stop: int
    states: range = range(0)
    known: frozenset[int] = frozenset()
    likely_pool: int = 0

    def entries(self, start: int, stop: int) -> tuple[EntryKey, ...]:
        return entries_of(self.entry_keys, self.tokens, start, stop)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Blocks that are held for entries that are being loaded.

    Attributes:
        cached: the cached blocks before the entries, held too: the request needs them as well.
        blocks: the blocks of the entries.
        gained: tokens that need not be computed once all is there.
    """

    wanted: WantedPrefix
    pool: int
    entries: EntryBlocks
    cached: tuple[int, ...]
    blocks: tuple[int, ...]
    gained: int

    @property
    def spared(self) -> tuple[int, int]:
        """Where the tokens begin and end that must be computed if nothing is loaded."""
        keys, state = self.entries.keys, self.entries.state
        if not self.wanted.states:
            return keys[0].token_start, keys[-1].token_stop
        stop = keys[-1].token_stop if state is None else state.after.token_stop
        return stop - self.gained, stop
