"""The engine's traffic with the stores outside of its cache: saves what is computed, loads what a request needs.

All methods belong to the event loop's thread.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from time import monotonic
from typing import Any, TypeVar

from baton.core.errors import BatonError
from baton.core.kv_entries import (
    ENTRY_TOKENS,
    DroppedEntries,
    EntryBlocks,
    EntryKey,
    KeepTime,
    KeptPrefix,
    Sources,
    StoreChanges,
    loaded_tokens,
)
from baton.core.types import NOTHING_LOADED, LoadedTokens
from baton.engine.prefix_tier import PrefixSource, PrefixTier
from baton.engine.request import EngineRequest
from baton.engine.scheduling.entry_plans import LoadPlan, WantedPrefix
from baton.engine.scheduling.scheduler import Scheduler

T = TypeVar("T")

_log = logging.getLogger(__name__)
# Loads at a time. One load keeps a link to host memory busy; the others search meanwhile.
_LOADS = 4
# The longest time that a request waits for a search, and then for a load. A load that is slower than that would seldom
# be faster than computing.
_FIND_S = 0.5
# What was offered is saved at most this often, while steps run. A chat load of 40 requests a second gave the event loop
# 300 turns a second without host memory, 590 with it when each request had calls of its own, and now 390. Saves next to
# a launch delay it, then the next ones are launched earlier, and requests that arrive just after miss a step.
_SAVE_EVERY_S = 0.05
_LOAD_S = 5.0
# Entries that a store has at its start: 16,384 of them took 0.17 s of CPU time, so each step takes this many.
_FOUND_AT_ONCE = 64
# A root that is dropped is not loaded for so long, because other nodes may still have its entries in stores that this
# one shares with them. Longer than a gateway waits for their drops.
DROPPED_S = 30.0


class TieredPrefixes:
    """Saves and loads of one engine.

    Args:
        source: other nodes' stores; None: nothing is pulled from them.
        on_room: called when blocks have become free.

    Attributes:
        loaded_tokens, load_s: tokens that were loaded so far, and the sum of the times that their loads took.
    """

    def __init__(
        self, tier: PrefixTier, source: PrefixSource | None, scheduler: Scheduler, *, on_room: Callable[[], None]
    ) -> None:
        assert scheduler.offload is not None
        self._tier = tier
        self._source = source
        self._scheduler = scheduler
        self._offload = scheduler.offload
        self._on_room = on_room
        self._places = asyncio.Semaphore(_LOADS)
        # Not a TaskGroup: blocks stay held until each copy is over, whatever becomes of its request.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._saving: set[asyncio.Task[None]] = set()  # of the same
        self.loaded_tokens, self.load_s = 0, 0.0
        self._save_s: float | None = None  # when to save what was offered
        self._dropped: dict[bytes, float] = {}  # until when a root is not loaded, on the loop's clock

    def save_finished(self, *, is_quiet: bool = True) -> None:
        """Begins to save the entries that the last steps have finished, those of several steps together.

        Args:
            is_quiet: a step has ended, and the next one is launched already, so no launch needs the host for a while.
        """
        if not self._is_time_to_save(is_quiet=is_quiet):
            return
        if saves := self._offload.saves.take_finished():
            saving = self._start(self._save(*saves))
            self._saving.add(saving)
            saving.add_done_callback(self._saving.discard)
        for keys, keep in self._offload.saves.take_kept():
            self._start(self._keep(keys, keep, after=frozenset(self._saving)))
        if forgotten := self._offload.saves.take_forgotten():
            self._start(self._drop(forgotten))

    def _is_time_to_save(self, *, is_quiet: bool) -> bool:
        """Whether what was offered has waited long enough: as long again if it is not quiet. It does not wait where
        nothing runs, because no step would come to begin it."""
        saves = self._offload.saves
        if not saves.has_calls:
            self._save_s = None
            return False
        now_s = monotonic()
        if self._save_s is None:
            self._save_s = now_s + _SAVE_EVERY_S
        due_s = self._save_s if is_quiet else self._save_s + _SAVE_EVERY_S
        if now_s < due_s and self._scheduler.steps_in_flight and not saves.is_pressing:
            return False
        self._save_s = None
        return True

    def wanted(self, request: EngineRequest) -> WantedPrefix | None:
        """The entries to look for that the cache lacks. Returns None if nothing can be found, as for most requests: a
        search takes some milliseconds on a busy node."""
        wanted = self._scheduler.wanted(request)
        if wanted is None or self._is_dropped(wanted.entry_keys.root):
            return None
        is_elsewhere = self._tier.has_stores or request.kept_elsewhere is not None
        return wanted if is_elsewhere or wanted.states or self._offload.may_have(wanted) else None

    async def prefetch(self, request: EngineRequest) -> LoadedTokens:
        """Loads the entries of a request that the cache lacks. Returns the tokens that were loaded. A load goes on when
        the call is cancelled."""
        wanted = self.wanted(request)
        if wanted is None:
            return NOTHING_LOADED
        if not await self._pull(wanted, request.kept_elsewhere):
            return NOTHING_LOADED
        async with self._places:
            try:
                found = await asyncio.wait_for(self._find(wanted), _FIND_S)
            except TimeoutError:
                return NOTHING_LOADED
            except BatonError as error:  # the node ends
                _log.warning("the stores could not be searched: %s", error)
                return NOTHING_LOADED
            if found is None or self._is_dropped(wanted.entry_keys.root):
                return NOTHING_LOADED
            pool, stop = found
            plan = self._scheduler.begin_load(wanted, pool, stop=stop)
            return NOTHING_LOADED if plan is None else await asyncio.shield(self._start(self._load(plan)))

    async def save_again(self, wanted: tuple[EntryKey, ...], pool: int) -> None:
        """Saves the first of the entries that another node wants, as far as the stores have lost them and a pool has
        them still."""
        if not wanted or self._is_dropped(wanted[0].root):
            return
        entries = self._offload.saves.begin_again(wanted, pool)
        if entries is not None:
            await asyncio.shield(self._start(self._save(entries)))

    def num_to_save_again(self, wanted: tuple[EntryKey, ...], pool: int) -> int:
        """How many of the first wanted entries `save_again` would save."""
        if not wanted or self._is_dropped(wanted[0].root):
            return 0
        return self._offload.saves.num_to_save_again(wanted, pool)

    def stores_changed(self, changes: StoreChanges) -> None:
        """Takes notice of a change in the stores."""
        kept = self._offload.kept
        kept.lost(changes.gone)
        kept.below(changes.below)
        if changes.found:
            wanted = (key for key in changes.found if not self._is_dropped(key.root))
            self._start(self._add_found(kept.found(wanted)))

    async def _add_found(self, steps: Iterator[None]) -> None:
        for number, _ in enumerate(steps):
            if number % _FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def drop_roots(self, roots: frozenset[bytes]) -> DroppedEntries:
        """Drops all entries with one of these roots from the stores.

        Raises:
            BatonError: the node ends.
        """
        now_s = monotonic()
        self._dropped = {each: end_s for each, end_s in self._dropped.items() if end_s > now_s}
        self._dropped |= dict.fromkeys(roots, now_s + DROPPED_S)
        # A task, so that it comes after the saves that have begun.
        return await asyncio.shield(self._start(self._tier.drop_entries_of(roots)))

    def _is_dropped(self, root: bytes) -> bool:
        return monotonic() < self._dropped.get(root, 0.0)

    async def close(self) -> None:
        """Waits for all copies; each ends within its own bound."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _pull(self, wanted: WantedPrefix, kept: KeptPrefix | None) -> bool:
        """Copies what another node has, and the stores lack, to the stores. Where ranks have requests of their own, the
        rank gets it that has most already, or in whose pool the request is likely to be.

        Returns False if the stores could not be searched, so that a request waits for one such search only.
        """
        if kept is None or self._source is None:
            return True
        stop = min(wanted.stop, kept.tokens // ENTRY_TOKENS)
        if wanted.states:
            return await self._pull_state(wanted, kept, stop)
        try:
            found = await asyncio.wait_for(self._find(wanted), _FIND_S)
        except (TimeoutError, BatonError):
            return False
        pool, start = found or (wanted.likely_pool, wanted.starts[wanted.likely_pool])
        owner = pool if len(wanted.starts) > 1 else None
        if start < stop and not self._is_dropped(wanted.entry_keys.root):
            # A pull goes on when the call is cancelled: what it brings stays, and its places must be given back.
            pull = self._source.pull(wanted.entries(start, stop), kept, owner=owner)
            await asyncio.shield(self._start(self._end_pull(pull, wanted, start)))
        return True

    async def _pull_state(self, wanted: WantedPrefix, kept: KeptPrefix, stop: int) -> bool:
        """The same for a model with recurrent states, where a prefix is of use only with its state."""
        assert self._source is not None
        start, states = wanted.starts[0], wanted.states
        keys = wanted.entries(start, max(start, stop))
        try:
            async with asyncio.timeout(_FIND_S):
                there = start + await self._tier.find_entries(keys, owner=None) if keys else start
                known = await self._last_state(wanted, there)
        except (TimeoutError, BatonError):
            return False
        first = states.start if not known else known + states.step
        resumed = first - states.step
        if first > stop or self._is_dropped(wanted.entry_keys.root):
            return True
        there = min(there, stop)
        start = min(there, first - 1)
        pull = self._source.pull_state(
            wanted.entries(start, stop),
            kept,
            held=there - start,
            every=states.step,
            resumed=resumed * ENTRY_TOKENS,
        )
        await asyncio.shield(self._start(self._end_pull(pull, wanted, start, held=there - start)))
        return True

    async def _end_pull(
        self, pull: Coroutine[Any, Any, int], wanted: WantedPrefix, start: int, *, held: int = 0
    ) -> None:
        """Remembers what a pull has brought, which is of use to later requests even if it is not loaded now: the
        entries from `start` on, but for the first ones that were `held` here."""
        pulled = await pull
        if not self._is_dropped(wanted.entry_keys.root):
            self._offload.kept.kept(wanted.entries(start + held, start + pulled), wanted.keys, wanted.tokens)

    async def _find(self, wanted: WantedPrefix) -> tuple[int, int] | None:
        """The pool whose rank has most of the wanted entries, and where they stop. Returns None if no rank has any."""
        best, most = None, 0
        for pool, start in enumerate(wanted.starts):
            owner = pool if len(wanted.starts) > 1 else None
            keys = wanted.entries(start, wanted.stop)
            stop = start + await self._tier.find_entries(keys, owner=owner) if keys else start
            if wanted.states:
                stop = await self._last_state(wanted, stop)
                return (pool, stop) if stop else None
            if stop > start and stop > most:
                best, most = (pool, stop), stop
        return best

    async def _last_state(self, wanted: WantedPrefix, stop: int) -> int:
        """The most entries before `stop` after which the cache or the stores have the state; 0: there is none."""
        after = [number for number in wanted.states if number <= stop]
        known = max(wanted.known.intersection(after), default=0)
        after = [number for number in after if number > known]
        keys = tuple(key for number in after for key in wanted.entries(number - 1, number))
        found = await self._tier.find_state(keys) if keys else 0
        return after[found - 1] if found else known

    async def _load(self, plan: LoadPlan) -> LoadedTokens:
        sources: Sources = ()
        added = 0
        began_s = monotonic()
        try:
            entry_s = self._scheduler.entry_s(plan)
            sources = await self._tier.load_entries(plan.entries, timeout_s=_LOAD_S, entry_s=entry_s)
        except BatonError as error:  # the node ends
            _log.warning("entries could not be loaded: %s", error)
        finally:
            added = self._offload.loads.end(plan, len(sources))
            if sources:
                self.loaded_tokens += min(len(sources), len(plan.entries.keys)) * ENTRY_TOKENS
                self.load_s += monotonic() - began_s
            self._on_room()
        return loaded_tokens(sources, added)

    async def _save(self, *saves: EntryBlocks) -> None:
        kept = (0,) * len(saves)
        try:
            kept = await self._tier.save_entries(*saves)
        except BatonError as error:  # the node ends
            _log.warning("entries could not be saved: %s", error)
        finally:
            for entries, num_kept in zip(saves, kept, strict=True):
                self._offload.saves.saved(entries, num_kept)
            self._on_room()

    async def _keep(
        self, keys: tuple[EntryKey, ...], keep: KeepTime, *, after: "frozenset[asyncio.Task[None]]"
    ) -> None:
        if after:
            await asyncio.wait(after)
        try:
            await self._tier.keep_entries(keys, keep, with_state=self._offload.has_states)
        except BatonError as error:  # the node ends
            _log.warning("entries could not be kept: %s", error)

    async def _drop(self, keys: tuple[EntryKey, ...]) -> None:
        try:
            await self._tier.drop_entries(keys)
        except BatonError as error:  # the node ends
            _log.warning("entries could not be dropped: %s", error)

    def _start(self, copy: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(copy)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
