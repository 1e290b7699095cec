"""Which entries of the cache are complete, and which are offered to the stores outside of it. Pure.

Blocks are held while an entry is copied from them, so that nothing else takes them.
"""

from collections.abc import Callable, Sequence

from baton.core.block_keys import KeyChain
from baton.core.kv_entries import ENTRY_TOKENS, EntryBlocks, EntryKey, EntryState, KeepTime
from baton.core.pools import blocks_for
from baton.engine.request import EngineRequest
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_plans import entries_of
from baton.engine.scheduling.kept_blocks import KeptBlocks
from baton.engine.scheduling.state import RequestState
from baton.engine.scheduling.state_slots import NO_SLOT, StateSlots

# The share of a pool's blocks that saves may hold, for some milliseconds each. Entries that need more are not saved.
_SAVING_SHARE = 0.5
# From this share on saves do not wait for others.
_WAITING_SHARE = 1 / 16
# A running request's entries are offered in so many at a time, and the rest when it ends. With a call for each one, the
# tokens of a chat load on an H200 took 4 % longer than without stores.
_ENTRIES_AT_ONCE = 16
# But no more than this share of a pool's: in a small one, what is offered together would not find room.
_AT_ONCE_SHARE = 1 / 16


class EntrySaves:
    """The entries that requests have offered.

    Args:
        slots: of recurrent states; None: the model has none.
        kept: the blocks of saved entries; followers of the cache see them.
        has_owners: whether each pool belongs to one rank.
        entry_keys: the chain of a request's entries.

    Attributes:
        num_held: references to blocks that saves hold.
        skipped: entries that were not saved, because saves held too many blocks.
    """

    def __init__(
        self,
        pools: Sequence[BlockManager],
        slots: StateSlots | None,
        kept: KeptBlocks,
        *,
        block_size: int,
        has_owners: bool,
        entry_keys: Callable[[EngineRequest], KeyChain],
    ) -> None:
        self.num_held = self.skipped = 0
        self._pools = pools
        self._slots = slots
        self._kept = kept
        self._block_size = block_size
        self._has_owners = has_owners
        self._entry_keys = entry_keys
        self._saving = [0] * len(pools)
        self._finished: list[EntryBlocks] = []
        self._has_state = False  # among what was offered; there are few slots
        self._forgotten: list[EntryKey] = []
        self._to_keep: list[tuple[tuple[EntryKey, ...], KeepTime]] = []
        # Entries that were not offered though the cache has, or had, their blocks: the oldest first.
        self._unsaved: dict[bytes, None] = {}
        self._shown: dict[EntryKey, tuple[bytes, ...]] = {}  # entries that followers see because of a state

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
                self._kept.lost(skipped)  # followers saw them with a state
        if stop <= first:
            return
        chain = self._chain_of(state)
        chain.add_known(state.tokens, stop, self._kept.entry_keys)
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
            self._kept.kept(entries.keys, state.keys, state.tokens)

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
        self._kept.kept(shown, state.keys, state.tokens)
        self._shown[after] = tuple(key.block.digest for key in shown)
        state.num_shown = max(state.num_shown, count)
        self._finished.append(EntryBlocks((), (), state=EntryState(after, slot)))
        self._has_state = True

    def forget(self, state: RequestState) -> None:
        """Takes a request's entries back, because its KV is not to be trusted."""
        state.is_shared = False
        # Also those before a state that was offered, because a state is dropped with the entry that it comes after.
        stop = max(state.num_offered, state.num_shown)
        forgotten = entries_of(self._chain_of(state), state.tokens, 0, stop)
        self._forgotten += forgotten
        self._kept.lost(key.block.digest for key in forgotten)

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
            self._to_keep.append((tuple(key._replace(block=key.block._replace(tokens=b"")) for key in keys), keep))

    def begin_again(self, wanted: Sequence[EntryKey], pool: int) -> EntryBlocks | None:
        """Holds the blocks of the first wanted entries in a pool that its cache has and the stores have lost, as far as
        there is room. It ends with `saved`. Returns None if there are none, if the model has recurrent states, or if
        entries can end within a block."""
        run, held = self._lost(wanted, pool)
        if not run:
            return None
        self._pools[pool].take(held, 0)
        self._count(pool, len(held))
        self._kept.kept_again(run)
        before = run[0].token_start // self._block_size
        return EntryBlocks(tuple(run), (*[0] * before, *held), pool if self._has_owners else None)

    def num_to_save_again(self, wanted: Sequence[EntryKey], pool: int) -> int:
        """How many of the first wanted entries `begin_again` would hold now."""
        return len(self._lost(wanted, pool)[0])

    def _lost(self, wanted: Sequence[EntryKey], pool: int) -> tuple[list[EntryKey], list[int]]:
        """The entries for `begin_again`, and their blocks."""
        run: list[EntryKey] = []
        held: list[int] = []
        if self._slots is not None or ENTRY_TOKENS % self._block_size:
            return run, held
        room = int(self._pools[pool].num_blocks * _SAVING_SHARE) - self._saving[pool]
        for key in wanted:
            blocks = self._pools[pool].cached_blocks(self._kept.blocks_of_lost(key))
            if not blocks or len(held) + len(blocks) > room:
                break
            run.append(key)
            held += blocks
        return run, held

    def drop_roots(self, roots: frozenset[bytes]) -> None:
        """Offers no entry with one of these roots any more."""
        for entries in self._finished:
            if entries.root in roots:
                self.saved(entries, 0)
        self._finished = [entries for entries in self._finished if entries.root not in roots]
        self._has_state = any(entries.state is not None for entries in self._finished)

    def take_kept(self) -> list[tuple[tuple[EntryKey, ...], KeepTime]]:
        """Sequences of entries to keep for a time, since the last call. Keep them after the saves that have begun."""
        kept, self._to_keep = self._to_keep, []
        return kept

    @property
    def has_calls(self) -> bool:
        """Whether anything waits to be saved, kept or dropped."""
        return bool(self._finished or self._to_keep or self._forgotten)

    @property
    def is_pressing(self) -> bool:
        """Whether what was offered holds many blocks or a state, blocks are short, or something must be dropped."""
        if self._forgotten or self._has_state:
            return True
        for pool, held in zip(self._pools, self._saving, strict=True):
            few = pool.num_blocks * _WAITING_SHARE
            if held > few or pool.num_free < few:
                return True
        return False

    def take_finished(self) -> list[EntryBlocks]:
        """The entries offered since the last call; their blocks stay held until `saved`."""
        finished, self._finished, self._has_state = self._finished, [], False
        return finished

    def take_forgotten(self) -> tuple[EntryKey, ...]:
        """The entries to drop since the last call. Drop them after the saves of `take_finished` have begun."""
        forgotten, self._forgotten = tuple(self._forgotten), []
        return forgotten

    def saved(self, entries: EntryBlocks, num_kept: int) -> None:
        """Releases the blocks of offered entries. The stores have the first `num_kept` of them."""
        self._kept.lost(key.block.digest for key in entries.keys[num_kept:])
        if entries.state is not None:
            assert self._slots is not None
            self._slots.unpin(entries.state.slot)
            shown = self._shown.pop(entries.state.after, ())
            if num_kept < len(entries):
                self._kept.lost(shown)
        pool, held = entries.owner or 0, self._blocks_of(entries)
        self._pools[pool].give_back(held)
        self._count(pool, -len(held))

    def _chain_of(self, state: RequestState) -> KeyChain:
        if state.entry_keys is None:
            state.entry_keys = self._entry_keys(state.request)
        return state.entry_keys

    def _blocks_of(self, entries: EntryBlocks) -> tuple[int, ...]:
        return entries.block_ids[entries.keys[0].token_start // self._block_size :] if entries.keys else ()

    def _count(self, pool: int, held: int) -> None:
        self._saving[pool] += held
        self.num_held += held
