"""Which entries of the cache are complete, and which blocks their copies need. Pure.

Blocks are held while an entry is copied from them or to them, so that nothing else takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.block_keys import KeyChain, adapted_identity
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, EntryState, KeepTime
from baton.core.pools import blocks_for
from baton.engine.request import EngineRequest, IntArray
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state import RequestState
from baton.engine.scheduling.state_slots import NO_SLOT, StateSlots

# The share of a pool's blocks that saves may hold, for some milliseconds each. Entries that need more are not saved.
_SAVING_SHARE = 0.5
# A running request's entries are offered in so many at a time, and the rest when it ends. With a call for each one, the
# tokens of a chat load on an H200 took 4 % longer than without stores.
_ENTRIES_AT_ONCE = 16
# But no more than this share of a pool's: in a small one, what is offered together would not find room.
_AT_ONCE_SHARE = 1 / 16


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


class Offload:
    """The entries of one engine's cache.

    Args:
        slots: of recurrent states; None: the model has none.
        has_owners: whether each pool belongs to one rank.

    Attributes:
        kept: the blocks of saved entries.
        num_held: references to blocks that copies hold.
        skipped: entries that were not saved, because saves held too many blocks.
        loaded_tokens: tokens whose KV has been loaded so far.
    """

    def __init__(
        self,
        pools: Sequence[BlockManager],
        slots: StateSlots | None = None,
        *,
        identity: str,
        block_size: int,
        has_owners: bool,
    ) -> None:
        self.num_held = self.skipped = self.loaded_tokens = 0
        self._pools = pools
        self._slots = slots
        self._identity = identity
        self._block_size = block_size
        self._has_owners = has_owners
        self.kept = KeptBlocks(block_size)
        self._saving = [0] * len(pools)
        self._finished: list[EntryBlocks] = []
        self._forgotten: list[EntryKey] = []
        self._kept: list[tuple[tuple[EntryKey, ...], KeepTime]] = []
        # Entries that were not offered though the cache has, or had, their blocks: the oldest first.
        self._unsaved: dict[bytes, None] = {}
        self._shown: dict[EntryKey, tuple[bytes, ...]] = {}  # entries that followers see because of a state
        self._loads: list[LoadPlan] = []

    def entry_keys(self, request: EngineRequest) -> KeyChain:
        """The chain of a request's entries."""
        identity = adapted_identity(self._identity, request.adapter)
        return KeyChain(identity=identity, cache_salt=request.cache_salt, block_size=ENTRY_TOKENS)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return self._slots is not None

    # ---- from the cache

    def registered(self, state: RequestState) -> None:
        """Offers the entries that are complete by now and holds their blocks, if they are enough for a call."""
        entries = self._pools[state.pool].num_blocks * self._block_size // ENTRY_TOKENS
        self._offer(state, at_least=max(1, min(_ENTRIES_AT_ONCE, int(entries * _AT_ONCE_SHARE))))

    def began(self, state: RequestState) -> None:
        """Lets a request that has got cached blocks offer those of their entries that nobody has offered. Without them
        nothing that comes after them would be of use."""
        if not self._unsaved:
            return
        chain = self._chain_of(state)
        cached = range(state.num_offered)
        lacking = (index for index in cached if chain.key(index, state.tokens).digest in self._unsaved)
        state.num_offered = next(lacking, state.num_offered)

    def preempted(self, state: RequestState) -> None:
        """Offers nothing of a request whose blocks are needed now, but remembers what its cached blocks would need."""
        if state.is_shared:
            self._remember(state, state.num_offered, self._num_complete(state))

    def _num_complete(self, state: RequestState) -> int:
        return state.num_registered * self._block_size // ENTRY_TOKENS

    def _remember(self, state: RequestState, first: int, stop: int) -> list[bytes]:
        """Remembers that entries are not offered. Returns their digests."""
        chain = self._chain_of(state)
        digests = [chain.key(index, state.tokens).digest for index in range(first, stop)]
        self._unsaved |= dict.fromkeys(digests)
        most = sum(pool.num_blocks for pool in self._pools) * self._block_size // ENTRY_TOKENS
        while len(self._unsaved) > most:  # the cache has lost some of them
            del self._unsaved[next(iter(self._unsaved))]
        return digests

    def _offer(self, state: RequestState, *, at_least: int, is_last: bool = False) -> None:
        """Offers entries as far as there is room; the others with the next call, unless it is the last one."""
        first, complete = state.num_offered, self._num_complete(state)
        if complete - first < at_least:
            return
        first = max(first, min(complete, -(-state.windows_from // ENTRY_TOKENS)))  # earlier ones lack layers
        room = int(self._pools[state.pool].num_blocks * _SAVING_SHARE) - self._saving[state.pool]
        stop = min(complete, first + max(0, (room - 1) * self._block_size // ENTRY_TOKENS))
        state.num_offered = stop
        if is_last and stop < complete:
            self.skipped += complete - stop
            skipped = self._remember(state, stop, complete)
            if self._slots is not None:
                self.kept.lost(skipped)  # followers saw them with a state
        if stop <= first:
            return
        chain = self._chain_of(state)
        owner = state.pool if self._has_owners else None
        blocks = tuple(state.blocks[: blocks_for(stop * ENTRY_TOKENS, self._block_size)])
        entries = EntryBlocks(entries_of(chain, state.tokens, first, stop), blocks, owner)
        for key in entries.keys if self._unsaved else ():
            self._unsaved.pop(key.block.digest, None)
        held = self._blocks_of(entries)
        self._pools[state.pool].take(held, 0)
        self._count(state.pool, len(held))
        self._finished.append(entries)
        if self._slots is None:
            self.kept.kept(entries.keys, state.keys, state.tokens)

    def offer_state(self, state: RequestState, num_tokens: int) -> None:
        """Offers the snapshot after that many tokens of a request, if there is one, and holds it. Followers of the
        cache see the entries before it from now on, because only such a prefix is of use."""
        assert self._slots is not None
        count = num_tokens // ENTRY_TOKENS
        slot = self._slots.pin(state.keys.key(num_tokens // self._block_size - 1, state.tokens)) if count else NO_SLOT
        if slot == NO_SLOT or not state.is_shared:
            if slot != NO_SLOT:
                self._slots.unpin(slot)
            return
        self._offer(state, at_least=1)  # a state is of no use without the entries before it
        chain = self._chain_of(state)
        (after,) = entries_of(chain, state.tokens, count - 1, count)
        shown = entries_of(chain, state.tokens, min(state.num_shown, count), count)
        self.kept.kept(shown, state.keys, state.tokens)
        self._shown[after] = tuple(key.block.digest for key in shown)
        state.num_shown = max(state.num_shown, count)
        self._finished.append(EntryBlocks((), (), state=EntryState(after, slot)))

    def forget(self, state: RequestState) -> None:
        """Takes a request's entries back, because its KV is not to be trusted."""
        state.is_shared = False
        # Also those before a state that was offered, because a state is dropped with the entry that it comes after.
        stop = max(state.num_offered, state.num_shown)
        forgotten = entries_of(self._chain_of(state), state.tokens, 0, stop)
        self._forgotten += forgotten
        self.kept.lost(key.block.digest for key in forgotten)

    def ended(self, state: RequestState) -> None:
        """Offers the rest of an ending request's entries, and asks for its keep time if it has one."""
        if state.is_shared:
            self._offer(state, at_least=1, is_last=True)
        keep = state.request.keep
        if keep is not None and state.num_offered and state.is_shared:
            stop = state.num_offered
            if self._slots is not None:
                stop = min(stop, state.state_tokens // ENTRY_TOKENS)
            if not stop:
                return
            keys = entries_of(self._chain_of(state), state.tokens, 0, stop)
            # Without tokens, because a long sequence has 2,000 entries, and each rank gets all of them.
            self._kept.append((tuple(key._replace(block=key.block._replace(tokens=b"")) for key in keys), keep))

    def may_have(self, wanted: WantedPrefix) -> bool:
        """Whether an entry was saved or loaded here that continues what is cached. Where blocks have owners it always
        may be: what one rank has evicted, another may have."""
        if self._has_owners:
            return True
        starts = (start for start in wanted.starts if start < wanted.stop)
        return any(self.kept.has(wanted.entries(start, start + 1)[0]) for start in starts)

    def take_kept(self) -> list[tuple[tuple[EntryKey, ...], KeepTime]]:
        """Sequences of entries to keep for a time, since the last call. Keep them after the saves that have begun."""
        kept, self._kept = self._kept, []
        return kept

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Forgets all entries with one of these roots. What is being loaded of them will not be added to the prefix
        cache."""
        for entries in self._finished:
            if entries.root in roots:
                self.saved(entries, 0)
        self._finished = [entries for entries in self._finished if entries.root not in roots]
        self._loads = [plan for plan in self._loads if plan.wanted.entry_keys.root not in roots]
        self.kept.lost_roots(roots)

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
        if entries.state is not None:
            assert self._slots is not None
            self._slots.unpin(entries.state.slot)
            shown = self._shown.pop(entries.state.after, ())
            if num_kept < len(entries):
                self.kept.lost(shown)
        pool, held = entries.owner or 0, self._blocks_of(entries)
        self._pools[pool].give_back(held)
        self._count(pool, -len(held))

    def _chain_of(self, state: RequestState) -> KeyChain:
        if state.entry_keys is None:
            state.entry_keys = self.entry_keys(state.request)
        return state.entry_keys

    def _blocks_of(self, entries: EntryBlocks) -> tuple[int, ...]:
        return entries.block_ids[entries.keys[0].token_start // self._block_size :] if entries.keys else ()

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
        if wanted.states:
            return self._begin_load_with_state(wanted, pool, cached, min(start, stop), stop, spare)
        if not wanted.starts[pool] <= start < stop:
            return None  # what was found does not continue what is cached
        first_block = start * ENTRY_TOKENS // self._block_size
        cached = cached[:first_block]
        room = max(0, self._pools[pool].num_free_without(cached) - spare)
        stop = min(stop, start + room * self._block_size // ENTRY_TOKENS)
        if stop <= start:
            return None
        return self._plan(wanted, pool, cached, start, stop, state=None, gained=0)

    def _begin_load_with_state(
        self, wanted: WantedPrefix, pool: int, cached: list[int], start: int, stop: int, spare: int
    ) -> LoadPlan | None:
        """As `begin_load`; all of it or nothing."""
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
        self.kept.kept(entries.keys, wanted.keys, wanted.tokens)
        plan = LoadPlan(wanted, pool, entries, tuple(cached), tuple(held[len(cached) :]), gained)
        self._loads.append(plan)
        return plan

    def end_load(self, plan: LoadPlan, num_entries: int) -> int:
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
        for index in range(first_block, stop_block):
            key = plan.wanted.keys.key(index, plan.wanted.tokens)
            is_usable = is_whole or not plan.wanted.states
            pool.register(plan.blocks[index - first_block], key, root=plan.wanted.keys.root, reported=is_usable)
        in_stores = 0 if plan.wanted.states and not is_whole else num_entries
        self.kept.lost(key.block.digest for key in entries.keys[in_stores:])
        held = (*plan.cached, *plan.blocks)
        if plan.wanted.states:
            added = self._end_state(plan, is_whole=is_whole)
        else:
            added = max(0, stop_block - first_block) * size
        pool.give_back(held)
        self.num_held -= len(held)
        self.loaded_tokens += added
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


def entries_of(chain: KeyChain, tokens: IntArray, start: int, stop: int) -> tuple[EntryKey, ...]:
    """The keys of a sequence's entries [start, stop)."""
    return tuple(EntryKey(chain.key(index, tokens), chain.root, index) for index in range(start, stop))
