"""Which entries of the cache are complete, and which blocks their copies need. Pure.

Blocks are held while an entry is copied from them or to them, so that nothing else takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.block_keys import KeyChain, adapted_identity
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, KeepTime
from baton.core.pools import blocks_for
from baton.engine.request import EngineRequest, IntArray
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state import RequestState

# The share of a pool's blocks that saves may hold, for some milliseconds each. Entries that need more are not saved.
_SAVING_SHARE = 0.5


@dataclass(frozen=True)
class WantedPrefix:
    """The start of a request's sequence that would be worth to load.

    Attributes:
        tokens: the whole sequence; `keys` and `entry_keys` are its chains of blocks and of entries.
        starts: for each pool, the first entry that is not in the cache.
        stop: number of entries that the request can use.
        likely_pool: the pool that has most of the sequence, and of equal ones the one with most free blocks.
    """

    tokens: IntArray
    keys: KeyChain
    entry_keys: KeyChain
    starts: tuple[int, ...]
    stop: int
    likely_pool: int = 0

    def entries(self, start: int, stop: int) -> tuple[EntryKey, ...]:
        return entries_of(self.entry_keys, self.tokens, start, stop)


@dataclass(frozen=True, eq=False)
class LoadPlan:
    """Blocks that are held for entries that are being loaded.

    Attributes:
        cached: the cached blocks before the entries, held too: the request needs them as well.
        blocks: the blocks of the entries.
    """

    wanted: WantedPrefix
    pool: int
    entries: EntryBlocks
    cached: tuple[int, ...]
    blocks: tuple[int, ...]


class Offload:
    """The entries of one engine's cache.

    Args:
        has_owners: whether each pool belongs to one rank.

    Attributes:
        kept: the blocks of saved entries.
        num_held: references to blocks that copies hold.
        skipped: entries that were not saved, because saves held too many blocks.
        loaded_tokens: tokens whose KV has been loaded so far.
    """

    def __init__(self, pools: Sequence[BlockManager], *, identity: str, block_size: int, has_owners: bool) -> None:
        self.num_held = self.skipped = self.loaded_tokens = 0
        self._pools = pools
        self._identity = identity
        self._block_size = block_size
        self._has_owners = has_owners
        self.kept = KeptBlocks(block_size)
        self._saving = [0] * len(pools)
        self._finished: list[EntryBlocks] = []
        self._forgotten: list[EntryKey] = []
        self._kept: list[tuple[tuple[EntryKey, ...], KeepTime]] = []
        self._loads: list[LoadPlan] = []

    def entry_keys(self, request: EngineRequest) -> KeyChain:
        """The chain of a request's entries."""
        identity = adapted_identity(self._identity, request.adapter)
        return KeyChain(identity=identity, cache_salt=request.cache_salt, block_size=ENTRY_TOKENS)

    # ---- from the cache

    def registered(self, state: RequestState) -> None:
        """Offers the entries that are complete since the last call, and holds their blocks."""
        first, stop = state.num_offered, state.num_registered * self._block_size // ENTRY_TOKENS
        if stop <= first:
            return
        state.num_offered = stop
        first = max(first, -(-state.windows_from // ENTRY_TOKENS))  # earlier ones lack layers
        room = int(self._pools[state.pool].num_blocks * _SAVING_SHARE) - self._saving[state.pool]
        fits = max(0, (room - 1) * self._block_size // ENTRY_TOKENS)
        self.skipped += max(0, stop - first - fits)
        stop = min(stop, first + fits)
        if stop <= first:
            return
        chain = self._chain_of(state)
        owner = state.pool if self._has_owners else None
        blocks = tuple(state.blocks[: blocks_for(stop * ENTRY_TOKENS, self._block_size)])
        entries = EntryBlocks(entries_of(chain, state.tokens, first, stop), blocks, owner)
        held = self._blocks_of(entries)
        self._pools[state.pool].take(held, 0)
        self._count(state.pool, len(held))
        self._finished.append(entries)
        self.kept.kept(entries.keys, state.keys, state.tokens)

    def forget(self, state: RequestState) -> None:
        """Takes a request's entries back, because its KV is not to be trusted."""
        forgotten = entries_of(self._chain_of(state), state.tokens, 0, state.num_offered)
        self._forgotten += forgotten
        self.kept.lost(key.block.digest for key in forgotten)

    def ended(self, state: RequestState) -> None:
        """Asks for the keep time of a request that ends, if it has one."""
        keep = state.request.keep
        if keep is not None and state.num_offered and state.is_shared:
            keys = entries_of(self._chain_of(state), state.tokens, 0, state.num_offered)
            # Without tokens, because a long sequence has 2,000 entries, and each rank gets all of them.
            self._kept.append((tuple(key._replace(block=key.block._replace(tokens=b"")) for key in keys), keep))

    def take_kept(self) -> list[tuple[tuple[EntryKey, ...], KeepTime]]:
        """Sequences of entries to keep for a time, since the last call. Keep them after the saves that have begun."""
        kept, self._kept = self._kept, []
        return kept

    def drop_root(self, root: bytes) -> None:
        """Forgets all entries with this root. What is being loaded of them will not be added to the prefix cache."""
        for entries in self._finished:
            if entries.keys[0].root == root:
                self.saved(entries, 0)
        self._finished = [entries for entries in self._finished if entries.keys[0].root != root]
        self._loads = [plan for plan in self._loads if plan.wanted.entry_keys.root != root]
        self.kept.lost_root(root)

    def take_finished(self) -> list[EntryBlocks]:
        """The entries offered since the last call; their blocks stay held until `saved`."""
        finished, self._finished = self._finished, []
        return finished

    def take_forgotten(self) -> tuple[EntryKey, ...]:
        """The entries to drop since the last call. Drop them after the saves of `take_finished` have begun."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def saved(self, entries: EntryBlocks, num_kept: int) -> None:
        """Releases the blocks of offered entries. The stores have the first `num_kept` of them."""
        self.kept.lost(key.block.digest for key in entries.keys[num_kept:])
        pool, held = entries.owner or 0, self._blocks_of(entries)
        self._pools[pool].give_back(held)
        self._count(pool, -len(held))

    def _chain_of(self, state: RequestState) -> KeyChain:
        if state.entry_keys is None:
            state.entry_keys = self.entry_keys(state.request)
        return state.entry_keys

    def _blocks_of(self, entries: EntryBlocks) -> tuple[int, ...]:
        return entries.block_ids[entries.keys[0].token_start // self._block_size :]

    def _count(self, pool: int, held: int) -> None:
        self._saving[pool] += held
        self.num_held += held

    # ---- to the cache

    def begin_load(
        self, wanted: WantedPrefix, pool: int, *, cached: list[int], stop: int, spare: int
    ) -> LoadPlan | None:
        """Takes free blocks for the entries from the cached ones to `stop`, as many as there are. Returns None if there
        are none, or the cache has the entries meanwhile.

        Args:
            cached: the leading blocks that the pool has cached now.
            spare: free blocks to leave.
        """
        start = self.first_missing(len(cached) * self._block_size)
        if not wanted.starts[pool] <= start < stop:
            return None  # what was found does not continue what is cached
        first_block = start * ENTRY_TOKENS // self._block_size
        cached = cached[:first_block]
        room = max(0, self._pools[pool].num_free_without(cached) - spare)
        stop = min(stop, start + room * self._block_size // ENTRY_TOKENS)
        if stop <= start:
            return None
        num_blocks = blocks_for(stop * ENTRY_TOKENS, self._block_size) - first_block
        held = self._pools[pool].take(cached, num_blocks)
        self.num_held += len(held)
        owner = pool if self._has_owners else None
        entries = EntryBlocks(wanted.entries(start, stop), tuple(held), owner)
        # Before the load, because what only passes through host memory is reported as lost meanwhile.
        self.kept.kept(entries.keys, wanted.keys, wanted.tokens)
        plan = LoadPlan(wanted, pool, entries, tuple(cached), tuple(held[first_block:]))
        self._loads.append(plan)
        return plan

    def end_load(self, plan: LoadPlan, num_entries: int) -> int:
        """Adds the full blocks of the first entries to the prefix cache, and releases all blocks. Returns the number of
        tokens that were added."""
        pool, size = self._pools[plan.pool], self._block_size
        first_block = len(plan.cached)
        is_wanted = plan in self._loads
        if is_wanted:
            self._loads.remove(plan)
        else:
            num_entries = 0
        stop_block = (plan.entries.keys[0].token_start + num_entries * ENTRY_TOKENS) // size
        for index in range(first_block, stop_block):
            key = plan.wanted.keys.key(index, plan.wanted.tokens)
            pool.register(plan.blocks[index - first_block], key, root=plan.wanted.keys.root)
        self.kept.lost(key.block.digest for key in plan.entries.keys[num_entries:])
        held = (*plan.cached, *plan.blocks)
        pool.give_back(held)
        self.num_held -= len(held)
        added = max(0, stop_block - first_block) * size
        self.loaded_tokens += added
        return added

    def first_missing(self, cached_tokens: int) -> int:
        """The first entry to load after this many cached tokens. It begins with a block, so that no cached block is
        written to."""
        start = cached_tokens // ENTRY_TOKENS
        while start * ENTRY_TOKENS % self._block_size:
            start -= 1
        return start


def entries_of(chain: KeyChain, tokens: IntArray, start: int, stop: int) -> tuple[EntryKey, ...]:
    """The keys of a sequence's entries [start, stop)."""
    return tuple(EntryKey(chain.key(index, tokens), chain.root, index) for index in range(start, stop))
