"""What the cache has of a sequence: the keys of its blocks, their matches, and the entries that only stores have. Pure.

It looks and changes nothing; `request_blocks` holds what it finds.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from baton.core.block_keys import KeyChain, adapted_identity
from baton.core.kv_entries import ENTRY_TOKENS
from baton.core.pools import blocks_for
from baton.engine.request import EngineRequest, IntArray, ModelFacts
from baton.engine.scheduling.block_manager import BlockManager
from baton.engine.scheduling.entry_plans import WantedPrefix
from baton.engine.scheduling.offload import Offload
from baton.engine.scheduling.request_states import RequestStates
from baton.engine.scheduling.state import RequestState


class PrefixSearch:
    """Searches the prefix caches of all pools of one engine.

    Args:
        offload: the entries for the stores outside of the cache; None: there are no such stores.
    """

    def __init__(
        self,
        facts: ModelFacts,
        pools: tuple[BlockManager, ...],
        states: RequestStates,
        offload: Offload | None,
        *,
        prefix_cache: bool,
    ) -> None:
        self._identity = facts.identity
        self._block_size = facts.block_size
        self._window_blocks = blocks_for(max(0, facts.window_tokens - 1), facts.block_size)
        self._pools = pools
        self._states = states
        self._offload = offload
        self._prefix_cache = prefix_cache

    def keys(self, request: EngineRequest) -> KeyChain:
        """The keys of the request's blocks, in a chain that its output may extend."""
        return self._given_keys(request).copy()

    def _given_keys(self, request: EngineRequest) -> KeyChain:
        identity = adapted_identity(self._identity, request.adapter)
        return request.chains.of(identity=identity, cache_salt=request.cache_salt, block_size=self._block_size)

    def num_tokens(self, blocks: list[int]) -> int:
        return len(blocks) * self._block_size

    def resumable(self, state: RequestState, pool: BlockManager) -> list[int]:
        """The pool's cached blocks for the start of the request, up to `RequestState.reusable_tokens`. The state after
        the last one is known."""
        return self.matched(state, pool, partial(self._states.resumes_after, state) if self._states.unit else None)

    def matched(
        self,
        state: RequestState,
        pool: BlockManager,
        ends_after: Callable[[int], bool] | None,
        *,
        stop: int | None = None,
    ) -> list[int]:
        """The pool's cached blocks that begin with the request's tokens.

        Args:
            ends_after: whether a match may end after so many blocks; None: after any number.
            stop: blocks end before this token.
        """
        if not self._prefix_cache:
            return []
        most = state.reusable_tokens if stop is None else min(state.reusable_tokens, stop - 1)
        return pool.match(
            state.keys,
            state.tokens,
            most // self._block_size,
            window_blocks=self._window_blocks,
            ends_after=ends_after,
        )

    def num_cached(self, state: RequestState) -> int:
        """Number of the request's leading tokens that need not be computed, in the pool that has most of them
        cached."""
        return self.num_tokens(max((self.resumable(state, pool) for pool in self._pools), key=len))

    def wanted(self, request: EngineRequest) -> WantedPrefix | None:
        """The entries that the cache lacks for a request. Returns None if there are none."""
        if self._offload is None:
            return None
        try:
            tokens = request.tokens
        except OverflowError:  # no vocabulary has such a token: the request is refused when it is submitted
            return None
        usable = 0 if request.scores_prompt else len(tokens) - 1
        if request.pool is not None:
            usable = request.pool.start
        stop = usable // ENTRY_TOKENS
        if not stop:
            return None
        keys = self._given_keys(request)
        runs = [self.run(pool, keys, tokens, usable) for pool in self._pools]
        starts = tuple(self._offload.loads.first_missing(self.num_tokens(run)) for run in runs)
        likely = max(range(len(starts)), key=lambda pool: (starts[pool], self._pools[pool].num_free))
        entry_keys = self._offload.given_entry_keys(request)
        wanted = WantedPrefix(tokens, keys, entry_keys, starts, stop, likely_pool=likely)
        if self._states.unit:
            return self._with_states(wanted, len(runs[0]))
        if min(starts) >= stop:
            return None
        entry_keys.add_known(tokens, stop, self._offload.kept.entry_keys)
        return wanted

    def _with_states(self, wanted: WantedPrefix, num_cached: int) -> WantedPrefix | None:
        """The wanted entries up to a state, for a model whose prefixes are of use only with the state after them.
        Returns None if the cache has the last state that the request can use."""
        unit = self._states.unit // ENTRY_TOKENS
        has_state = {number for number in range(unit, wanted.stop + 1, unit) if self._has_state(wanted, number)}
        resumed = max(
            (number for number in has_state if number * ENTRY_TOKENS <= num_cached * self._block_size), default=0
        )
        after = range(resumed + unit, wanted.stop + 1, unit)
        if not after:
            return None
        return replace(wanted, states=after, stop=after[-1], known=frozenset(has_state.intersection(after)))

    def _has_state(self, wanted: WantedPrefix, entries: int) -> bool:
        last_block = wanted.keys.key(entries * ENTRY_TOKENS // self._block_size - 1, wanted.tokens)
        return self._states.slots.has(last_block)

    def run(self, pool: BlockManager, keys: KeyChain, tokens: IntArray, stop: int) -> list[int]:
        """The pool's cached blocks for a sequence's tokens before `stop`."""
        return pool.match(keys, tokens, stop // self._block_size, window_blocks=self._window_blocks)
