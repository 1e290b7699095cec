"""Counts the blocks that requests need, and assigns, registers and frees them. Pure.

`prefix_search` knows the keys of blocks, and finds the cached ones.

With attention data parallelism each rank has a pool of blocks, and a request has all of its blocks in one pool.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.pools import blocks_for, take_from_roomiest
from baton.engine.request import ModelFacts, Reservation
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_plans import LoadPlan, WantedPrefix
from baton.engine.scheduling.offload import Offload
from baton.engine.scheduling.prefix_search import PrefixSearch
from baton.engine.scheduling.prefixes import PooledPrefixes, PrefixCache
from baton.engine.scheduling.request_states import RequestStates
from baton.engine.scheduling.state import RequestState


class OwnerPlace(NamedTuple):
    """The pool for a request's blocks, and the request's blocks that this pool has cached.

    Attributes:
        resumed: number of cached blocks after which the recurrent state is known, if the model has one.
    """

    pool: int
    cached: list[int]
    resumed: int


class RequestBlocks:
    """The blocks of all requests of one engine.

    Args:
        offloads: whether there are stores outside of the cache. Not with recurrent states and several owners.

    Attributes:
        search: finds what the cache has of a sequence.
        offload: its entries for the stores outside of the cache; None: there are no such stores.
        states: the recurrent states of the requests, which are assigned together with blocks.
        queried_tokens, hit_tokens: tokens looked up in the prefix cache so far, and tokens found there.
    """

    def __init__(self, facts: ModelFacts, *, prefix_cache: bool, offloads: bool = False) -> None:
        self._block_size = facts.block_size
        self._prefix_cache = prefix_cache
        self._window_tokens = facts.window_tokens
        self._pools = tuple(BlockManager(facts.num_blocks) for _ in range(facts.num_owners))
        self.states = RequestStates(
            facts,
            prefix_cache=prefix_cache,
            entry_tokens=ENTRY_TOKENS if offloads else 1,
        )
        self.queried_tokens = self.hit_tokens = 0
        self.offload: Offload | None = None
        if offloads and prefix_cache:
            assert not facts.state_slots or facts.num_owners == 1, "the slots of states have no owners"
            self.offload = Offload(
                self._pools,
                self.states.slots if self.states.unit else None,
                identity=facts.identity,
                block_size=facts.block_size,
                has_owners=facts.num_owners > 1,
            )
        self.search = PrefixSearch(
            facts,
            self._pools,
            self.states,
            self.offload,
            prefix_cache=prefix_cache,
        )

    @property
    def prefixes(self) -> PrefixCache:
        """The prefix caches of all pools and of the stores outside of the cache, for followers."""
        if self.offload is not None:
            return PooledPrefixes(self._pools, self.offload.kept)
        return self._pools[0] if len(self._pools) == 1 else PooledPrefixes(self._pools)

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self._pools)

    @property
    def num_references(self) -> int:
        """Blocks that requests hold; one that two of them share counts twice."""
        return sum(pool.num_references for pool in self._pools)

    def needed(self, state: RequestState) -> int:
        """Number of blocks that the request must hold before it may run: for its known tokens and the first decoded
        one."""
        return self._blocks_for(state.prefill_stop if state.prefill_only else state.num_tokens + 1)

    def reservation(self, state: RequestState) -> Reservation:
        """The reservation of the request's blocks, with the KV that they expect from elsewhere."""
        resume_at = state.num_tokens
        if self._prefix_cache:
            # A later sequence can share all full blocks of this one. Prefixes match in whole blocks, so the KV of a
            # sliding window must begin at a block.
            resume_at = max(state.num_cached, (resume_at // self._block_size - 1) * self._block_size + 1)
        return Reservation(
            state.request_id,
            tuple(state.blocks),
            state.num_cached,
            resume_at,
            state.state_slot,
            state.owner,
            state.restart_at,
        )

    def fill(self, state: RequestState) -> None:
        """Records that the KV of all the request's tokens has arrived, as its reservation asks."""
        self._received(state, state.num_tokens)
        self.states.received(state)
        state.fill()
        self.register(state)

    def fill_part(self, state: RequestState, num_tokens: int) -> None:
        """Records that the KV of `num_tokens` leading tokens has arrived; it was sent with the lesser of the
        reservation's `resume_at` and `num_tokens`."""
        self._received(state, num_tokens)
        self.states.received(state)
        state.receive(num_tokens)
        self.register(state)

    def _received(self, state: RequestState, num_tokens: int) -> None:
        if self._window_tokens:
            resume_at = min(self.reservation(state).resume_at, num_tokens)
            state.windows_from = max(0, resume_at - self._window_tokens + 1)

    def room(self, spare: Counter[int], before: Iterable[RequestState] = ()) -> list[int]:
        """Free blocks of each pool, minus those to spare and those that the requests `before` need if each takes the
        pool with most room. May be below 0."""
        room = [pool.num_free - spare[number] for number, pool in enumerate(self._pools)]
        for state in before:
            take_from_roomiest(room, self.needed(state))
        return room

    def place(
        self, state: RequestState, room: list[int], *, before: int = 0, arriving_tokens: int | None = None
    ) -> OwnerPlace | None:
        """The pool where the request's blocks fit that has most room left afterwards. Returns None if no pool has room,
        or if no state slot is left after `before` other requests.

        A cached block counts as two, because it is neither taken nor computed. So a conversation stays on its rank, and
        a short prefix that all requests share does not bring all of them to one rank.

        Args:
            room: free blocks of each pool.
            arriving_tokens: the state after these tokens will arrive, so the state after the cached blocks is not
                needed, and the last block is sent with the state.
        """
        if not self.states.has_room(others=before):
            return None
        best, most = None, -1
        for number, pool in enumerate(self._pools):
            cached = self.search.resumable(state, pool)
            resumed = len(cached)
            if arriving_tokens is not None and self.states.unit:
                cached = max(cached, self.search.matched(state, pool, None, stop=arriving_tokens), key=len)
            held_anew = pool.num_free - pool.num_free_without(cached)
            left = room[number] - held_anew - (self.needed(state) - len(cached))
            if left >= 0 and left + len(cached) > most:
                best, most = OwnerPlace(number, cached, resumed), left + len(cached)
        return best

    def take(self, state: RequestState, place: OwnerPlace) -> None:
        """Gives the request all blocks that it needs; the cached ones come first."""
        pool, cached = self._pools[place.pool], place.cached
        known_blocks = len(self.search.matched(state, pool, None)) if self.states.unit else 0
        blocks = pool.take(cached, self.needed(state) - len(cached))
        state.hold(
            blocks,
            owner=place.pool if len(self._pools) > 1 else None,
            num_cached_blocks=len(cached),
            restart_at=place.resumed * self._block_size,
            block_size=self._block_size,
        )
        self._began(state)
        self.states.take(state, place.resumed, known_blocks)
        if self._prefix_cache:
            self.queried_tokens += state.num_tokens
            self.hit_tokens += self.search.num_tokens(cached)

    def restart(self, state: RequestState) -> bool:
        """Lets the request compute its tokens from `restart_at` on here, because no state arrives. It writes to its own
        blocks, because others may share the cached ones. Returns False and changes nothing when too few are free."""
        shared = state.blocks[state.restart_at // self._block_size : state.num_cached // self._block_size]
        own = self._pools[state.pool].replace(shared)
        if own is None:
            return False
        self.hit_tokens -= state.num_cached - state.restart_at
        state.restart(own, block_size=self._block_size)
        self._began(state)
        return True

    def _began(self, state: RequestState) -> None:
        if self.offload is None:
            return
        if self._window_tokens:  # NOTE: a cached block without its windows must not be saved
            cached = state.blocks[: state.num_registered]
            state.windows_from = self._pools[state.pool].windows_from(cached) * self._block_size
        self.offload.saves.began(state)

    def extend(self, state: RequestState, num_slots: int) -> bool:
        """Gives the request blocks for `num_slots` slots. Returns False and changes nothing when too few are free."""
        missing, pool = self._blocks_for(num_slots) - len(state.blocks), self._pools[state.pool]
        if missing > pool.num_free:
            return False
        if missing > 0:
            state.blocks.extend(pool.take((), missing))
        return True

    def draft_room(self, state: RequestState, num_drafts: int) -> int:
        """How many of so many drafts have slots after the request's next token. Gives it blocks for them if that
        leaves half of the free ones."""
        wanted = state.num_scheduled + 1 + num_drafts
        pool = self._pools[state.pool]
        missing = self._blocks_for(wanted) - len(state.blocks)
        if 0 < missing <= pool.num_free // 2:
            self.extend(state, wanted)
        return min(num_drafts, len(state.blocks) * self._block_size - state.num_scheduled - 1)

    def add_one_each(self, states: Sequence[RequestState]) -> bool:
        """Gives each of the requests one more block. Returns False and changes nothing when too few are free."""
        shares = [[state for state in states if state.pool == number] for number in range(len(self._pools))]
        if any(len(share) > pool.num_free for share, pool in zip(shares, self._pools, strict=True)):
            return False
        for share, pool in zip(shares, self._pools, strict=True):
            for state, block_id in zip(share, pool.take((), len(share)), strict=True):
                state.blocks.append(block_id)
        return True

    def register(self, state: RequestState) -> None:
        """Offers the request's full, computed blocks to later requests."""
        if not self._prefix_cache or not state.is_shared:
            return
        # In a model with states, later blocks serve only requests whose state arrives.
        reported_tokens = state.state_tokens if self.states.unit else state.num_computed
        register, block_size, first = self._pools[state.pool].register, self._block_size, state.num_registered
        state.num_registered = stop = max(first, state.num_computed // block_size)
        for index, key in enumerate(state.keys.run(first, stop, state.tokens), first):
            start = index * block_size
            register(
                state.blocks[index],
                key,
                root=state.keys.root,
                windowless=start < state.windows_from,
                reported=start + block_size <= reported_tokens,
            )
        if self.offload is not None:
            self.offload.saves.registered(state)

    def report(self, state: RequestState) -> None:
        """Shows followers of the cache the blocks before the last snapshot of the request's state."""
        stop = min(state.num_registered, state.state_tokens // self._block_size)
        if stop > state.num_reported:
            self._pools[state.pool].report(state.blocks[state.num_reported : stop])
            state.num_reported = stop

    def offer_states(self, snapshots: Iterable[tuple[RequestState, int]]) -> None:
        """Offers snapshots of requests, each with its number of tokens, to the stores outside of the cache."""
        if self.offload is not None:
            for state, num_tokens in snapshots:
                self.offload.saves.offer_state(state, num_tokens)

    def forget(self, state: RequestState) -> None:
        """Removes the request's blocks from the prefix cache, because logits computed from them were not finite."""
        self._pools[state.pool].forget(state.blocks)
        self.states.forget(state)
        if self.offload is not None:
            self.offload.saves.forget(state)

    def drop_roots(self, roots: frozenset[bytes], states: Iterable[RequestState]) -> int:
        """Removes all sequences with one of these roots from the prefix cache. Returns the number of blocks.

        Args:
            states: all live requests; those of these roots that have run share no block from now on.
        """
        for state in states:
            if (state.blocks or state.started) and state.keys.root in roots:
                state.is_shared = False
        self.states.slots.forget_roots(roots)
        return sum(pool.forget_roots(roots) for pool in self._pools)

    def begin_load(self, wanted: WantedPrefix, pool: int, *, stop: int, spare: int) -> LoadPlan | None:
        """See `EntryLoads.begin`."""
        assert self.offload is not None
        cached = self.search.run(self._pools[pool], wanted.keys, wanted.tokens, wanted.stop * ENTRY_TOKENS)
        return self.offload.loads.begin(wanted, pool, cached=cached, stop=stop, spare=spare)

    def end(self, state: RequestState) -> None:
        """Gives the blocks of a request back that ends. Those whose KV is being saved become free later."""
        if self.offload is not None:
            if state.passing is not None:  # the last of a request that ends is where a conversation goes on
                self.offload.saves.offer_state(state, state.state_tokens)
            self.offload.saves.ended(state)
        self._give_back(state)

    def preempt(self, state: RequestState) -> None:
        """Gives the blocks of a request back that goes on later. None of them waits for a save."""
        if self.offload is not None:
            self.offload.saves.preempted(state)
        self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        self._pools[state.pool].give_back(state.drop_blocks())
        self.states.give_back(state)

    def _blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self._block_size)
