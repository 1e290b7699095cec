"""Loads of entries from the stores outside of the cache, and the blocks that wait for them. Pure.

Blocks are held while an entry is copied to them, so that nothing else takes them.
"""

from collections.abc import Sequence

from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryState
from baton.core.pools import blocks_for
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_plans import LoadPlan, WantedPrefix
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state_slots import NO_SLOT, StateSlots


class EntryLoads:
    """The loads that have not ended.

    Args:
        slots: of recurrent states; None: the model has none.
        kept: the blocks of saved entries; followers of the cache see them.
        has_owners: whether each pool belongs to one rank.

    Attributes:
        num_held: references to blocks that loads hold.
    """

    def __init__(
        self,
        pools: Sequence[BlockManager],
        slots: StateSlots | None,
        kept: KeptBlocks,
        *,
        block_size: int,
        has_owners: bool,
    ) -> None:
        self.num_held = 0
        self._pools = pools
        self._slots = slots
        self._kept = kept
        self._block_size = block_size
        self._has_owners = has_owners
        self._loads: list[LoadPlan] = []

    def begin(self, wanted: WantedPrefix, pool: int, *, cached: list[int], stop: int, spare: int) -> LoadPlan | None:
        """Takes free blocks for the entries from the cached ones to `stop`, as many as there are. Returns None if there
        are none, or the cache has the entries meanwhile.

        Args:
            cached: the leading blocks that the pool has cached now.
            spare: free blocks to leave.
        """
        start = self.first_missing(len(cached) * self._block_size)
        if wanted.states:
            return self._begin_with_state(wanted, pool, cached, min(start, stop), stop, spare)
        if not wanted.starts[pool] <= start < stop:
            return None  # what was found does not continue what is cached
        first_block = start * ENTRY_TOKENS // self._block_size
        cached = cached[:first_block]
        room = max(0, self._pools[pool].num_free_without(cached) - spare)
        stop = min(stop, start + room * self._block_size // ENTRY_TOKENS)
        if stop <= start:
            return None
        return self._plan(wanted, pool, cached, start, stop, state=None, gained=0)

    def _begin_with_state(
        self, wanted: WantedPrefix, pool: int, cached: list[int], start: int, stop: int, spare: int
    ) -> LoadPlan | None:
        """As `begin`; all of it or nothing."""
        assert self._slots is not None
        if start < min(wanted.starts[pool], stop):
            return None  # the cache has lost blocks since the search
        cached = cached[: start * ENTRY_TOKENS // self._block_size]
        room = self._pools[pool].num_free_without(cached) - spare
        if room < (stop - start) * ENTRY_TOKENS // self._block_size:
            return None
        last_block = wanted.keys.key(stop * ENTRY_TOKENS // self._block_size - 1, wanted.tokens)
        gained = (stop - wanted.states.start + wanted.states.step) * ENTRY_TOKENS
        if self._slots.has(last_block):
            if start == stop:
                return None  # another request has loaded it meanwhile
            return self._plan(wanted, pool, cached, start, stop, state=None, gained=gained)
        slot = self._slots.begin_snapshot(last_block, spare=1)  # for a request, which goes first
        if slot == NO_SLOT:
            return None
        (after,) = wanted.entries(stop - 1, stop)
        return self._plan(wanted, pool, cached, start, stop, state=EntryState(after, slot), gained=gained)

    def _plan(
        self,
        wanted: WantedPrefix,
        pool: int,
        cached: list[int],
        start: int,
        stop: int,
        *,
        state: EntryState | None,
        gained: int,
    ) -> LoadPlan:
        num_blocks = blocks_for(stop * ENTRY_TOKENS, self._block_size) - len(cached)
        held = self._pools[pool].take(cached, num_blocks)
        self.num_held += len(held)
        owner = pool if self._has_owners else None
        entries = EntryBlocks(wanted.entries(start, stop), tuple(held), owner, state)
        # Before the load, because what only passes through host memory is reported as lost meanwhile.
        self._kept.kept(entries.keys, wanted.keys, wanted.tokens)
        plan = LoadPlan(wanted, pool, entries, tuple(cached), tuple(held[len(cached) :]), gained)
        self._loads.append(plan)
        return plan

    def end(self, plan: LoadPlan, num_entries: int) -> int:
        """Adds the full blocks of the first entries to the prefix cache, and the state if there is one and all before
        it is there. Releases all blocks. Returns the number of tokens that need not be computed any more."""
        pool, size, entries = self._pools[plan.pool], self._block_size, plan.entries
        first_block = len(plan.cached)
        is_wanted = plan in self._loads
        if is_wanted:
            self._loads.remove(plan)
        else:
            num_entries = 0
        is_whole = is_wanted and num_entries == len(entries)
        stop_block = first_block
        if entries.keys:
            stop_block = (entries.keys[0].token_start + min(num_entries, len(entries.keys)) * ENTRY_TOKENS) // size
        is_usable = is_whole or not plan.wanted.states
        keys = plan.wanted.keys.run(first_block, stop_block, plan.wanted.tokens)
        for block_id, key in zip(plan.blocks[: len(keys)], keys, strict=True):
            pool.register(block_id, key, root=plan.wanted.keys.root, reported=is_usable)
        in_stores = 0 if plan.wanted.states and not is_whole else num_entries
        self._kept.lost(key.block.digest for key in entries.keys[in_stores:])
        held = (*plan.cached, *plan.blocks)
        if plan.wanted.states:
            added = self._end_state(plan, is_whole=is_whole)
        else:
            added = max(0, stop_block - first_block) * size
        pool.give_back(held)
        self.num_held -= len(held)
        return added

    def _end_state(self, plan: LoadPlan, *, is_whole: bool) -> int:
        """Ends the load of a prefix that is of use only with its state. Returns the number of tokens that need not be
        computed any more."""
        wanted, state = plan.wanted, plan.entries.state
        if state is not None:
            assert self._slots is not None
            last_block = wanted.keys.key(state.after.token_stop // self._block_size - 1, wanted.tokens)
            self._slots.end_snapshot(last_block, state.slot, written=is_whole, root=wanted.keys.root)
        if not is_whole:
            return 0
        self._pools[plan.pool].report(plan.cached)
        return plan.gained

    def first_missing(self, cached_tokens: int) -> int:
        """The first entry to load after this many cached tokens. It begins with a block, so that no cached block is
        written to."""
        start = cached_tokens // ENTRY_TOKENS
        while start * ENTRY_TOKENS % self._block_size:
            start -= 1
        return start

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Adds nothing to the prefix cache of what is being loaded with one of these roots."""
        self._loads = [plan for plan in self._loads if plan.wanted.entry_keys.root not in roots]
