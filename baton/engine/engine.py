"""The requests of one engine: takes, admits and ends them at any time, and passes each step's events to a callback.

All methods belong to the event loop's thread and return at once, also while steps run. When steps are launched is the
matter of the step loop, which is woken when requests come or go.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType

from baton.core.kv_entries import DroppedEntries, EntryKey, StoreChanges
from baton.core.types import NOTHING_LOADED, AdapterRef, FinishReason, Grammar, LoadedTokens, TokenOutput
from baton.engine.adapters import AdapterSlots
from baton.engine.device.device_thread import ExpertCounts, StepRunner
from baton.engine.events import StepEvents
from baton.engine.prefix_tier import PrefixSource, PrefixTier
from baton.engine.request import EngineLimits, EngineLoad, EngineRequest, Reservation
from baton.engine.scheduling.costs import Costs
from baton.engine.scheduling.prefixes import PrefixCache
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.speculation.speculator import Speculator
from baton.engine.step_loop import StepLoop
from baton.engine.tiered_prefixes import TieredPrefixes
from baton.grammar.compiler import GrammarCompiler
from baton.models.adapters.adapter import Adapter

_log = logging.getLogger(__name__)


class Engine:
    """Runs requests on one device. An async context manager: entry prepares the device, which may take minutes, and
    raises its errors.

    On exit the steps in flight end, and every remaining request fails with Cancelled.

    Args:
        on_step: called on the event loop after each step, during a step at each of its marks, and when waiting
            requests are refused. It must not raise: if it does, the engine ends.
        grammars: compiles the grammars of requests.
        meter: learns step costs; None: they stay unknown.
        num_adapters: slots of the runner for adapters.
        tier: the stores outside of the cache; None: there are none.
        source: the stores of other nodes; None: nothing is pulled from them.
        speculator: drafts tokens; None: nothing is drafted.
        on_room: called on the event loop when copies between cache and stores have given blocks back, without which
            `reserve` may have found no room. It must not raise.

    Attributes:
        adapters: the slots of the loaded adapters.
    """

    def __init__(
        self,
        runner: StepRunner,
        limits: EngineLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[StepEvents], None],
        grammars: GrammarCompiler,
        meter: Costs | None = None,
        num_adapters: int = 0,
        tier: PrefixTier | None = None,
        source: PrefixSource | None = None,
        on_room: Callable[[], None] | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self._grammars = grammars
        self._scheduler = Scheduler(
            limits,
            runner.facts,
            meter,
            is_pending=grammars.is_pending,
            offloads=tier is not None,
            speculator=speculator,
        )
        self._prefixes = (
            None if tier is None else TieredPrefixes(tier, source, self._scheduler, on_room=self._room_freed)
        )
        self.adapters = AdapterSlots(num_adapters, self._scheduler.uses_adapter)
        self._clock = clock
        self._on_room = on_room
        self._steps = StepLoop(runner, self._scheduler, self._prefixes, clock=clock, on_step=on_step)

    async def __aenter__(self) -> "Engine":
        await self._steps.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._steps.close()

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output."""
        return self._scheduler.max_context_tokens

    @property
    def prefix_cache(self) -> PrefixCache:
        """The prefix cache, for followers of its contents."""
        return self._scheduler.prefix_cache

    def set_limits(self, limits: EngineLimits) -> None:
        """Replaces the limits when the node changes its role."""
        self._scheduler.set_limits(limits)

    def submit(self, request: EngineRequest) -> None:
        """Takes a request whose prompt is computed here.

        A `prefill_only` request ends with its first token, or at its `stop_tokens`, and its blocks stay held until
        `abort`.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: too many requests wait already, or it cannot meet its deadline and has `refuse_late`.
            UnknownModel: its adapter is not loaded.
        """
        self._steps.check_alive()
        request = self._with_slot(request)
        self._prepare_grammar(request)
        self._scheduler.submit(request, self._clock())
        self._steps.wake()

    def reserve(self, request: EngineRequest, *, arriving_tokens: int = 0) -> Reservation:
        """Holds all blocks of a request whose KV comes from elsewhere, until `admit`, `prefill_here` or `abort`.

        Args:
            arriving_tokens: number of leading tokens whose KV will arrive, with the recurrent state after them; 0: all
                tokens.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room now.
            UnknownModel: its adapter is not loaded.
        """
        self._steps.check_alive()
        request = self._with_slot(request)
        self._prepare_grammar(request)
        return self._scheduler.reservations.reserve(request, self._clock(), arriving_tokens=arriving_tokens)

    def extend_reserved(self, request_id: str, output: tuple[int, ...]) -> Reservation:
        """Extends a reservation by tokens that were sampled elsewhere. `output` is the whole output so far; blocks may
        be added.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had.
            Overloaded: no block left; the reservation stays as it was.
        """
        return self._scheduler.reservations.extend(request_id, output)

    def admit(
        self, request_id: str, first: TokenOutput, drafts: Sequence[int] = (), *, has_draft: bool = True
    ) -> FinishReason | None:
        """Lets a reserved request decode, once all KV before `first`, its next token, has arrived. It joins the next
        step that is not launched yet and has a seat.

        Args:
            drafts: for the tokens after `first`, from the node that computed the prompt. Any are safe.
            has_draft: KV of layers that draft tokens has arrived too, if the model has such layers here.

        Returns the reason when `first` is also the last token; then the request has ended and its blocks are free.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `first` is not the request's next token.
        """
        reason = self._scheduler.reservations.admit(request_id, first, drafts, has_draft=has_draft)
        self._steps.wake()
        return reason

    def prefill_here(
        self, request_id: str, output: tuple[int, ...], *, received_tokens: int = 0, has_draft: bool = True
    ) -> None:
        """Computes the rest of a reserved request's sequence here. `output` is its whole output so far.

        Args:
            received_tokens: number of leading tokens whose KV has arrived in the reserved blocks; it was sent with the
                lesser of the reservation's `resume_at` and this number. A multiple of the block size; 0: none has
                arrived.
            has_draft: as in `admit`.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had, or `received_tokens` cannot be right.
        """
        self._scheduler.reservations.prefill_here(
            request_id, output, self._clock(), received_tokens=received_tokens, has_draft=has_draft
        )
        self._steps.wake()

    async def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a request's grammar on another thread, so that no step waits for it.

        Raises:
            InvalidRequest: the grammar cannot be followed.
        """
        await asyncio.to_thread(self._grammars.check, grammar)

    def may_prefetch(self, request: EngineRequest) -> bool:
        """Whether `prefetch` would look for anything. A task for nothing would cost the request two turns of the event
        loop, and so maybe a step."""
        if self._prefixes is None or self._steps.is_over:
            return False
        try:
            return self._prefixes.wanted(request) is not None
        except Exception:  # noqa: BLE001  the request does not depend on it
            _log.exception("a request's prompt could not be looked for")
            return False

    async def prefetch(self, request: EngineRequest) -> LoadedTokens:
        """Reads the start of a request's sequence that the stores have into the prefix cache, where the request finds
        it. Call it before `submit` or `reserve`. Returns at once if there are no stores, and otherwise within a bound.

        Returns:
            The tokens that were read.
        """
        if self._prefixes is None or self._steps.is_over:
            return NOTHING_LOADED
        try:
            return await self._prefixes.prefetch(request)
        except Exception:  # noqa: BLE001  the request does not depend on it
            _log.exception("a request's prompt could not be looked for")
            return NOTHING_LOADED

    def stores_changed(self, changes: StoreChanges) -> None:
        """Takes notice of a change in the stores outside of the cache."""
        if self._prefixes is not None:
            self._prefixes.stores_changed(changes)

    async def save_again(self, wanted: tuple[EntryKey, ...], owner: int | None) -> None:
        """Saves the first of the entries that another node wants, as far as the stores have lost them and the cache has
        them still.

        Args:
            owner: the only rank that counts; None: all ranks have the same.
        """
        if self._prefixes is not None and not self._steps.is_over:
            await self._prefixes.save_again(wanted, owner or 0)

    def num_to_save_again(self, wanted: tuple[EntryKey, ...], owner: int | None) -> int:
        """How many of the first wanted entries `save_again` would save now."""
        if self._prefixes is None or self._steps.is_over:
            return 0
        return self._prefixes.num_to_save_again(wanted, owner or 0)

    async def drop_prefixes(self, cache_salt: str, adapters: Iterable[AdapterRef]) -> tuple[int, DroppedEntries]:
        """Drops all KV of a cache salt, of the model and of its adapters, from the prefix cache and the stores.

        Blocks that requests use stay until these end, but no other request finds them.

        Args:
            adapters: besides those that were loaded here since the start.

        Returns:
            The number of blocks, and what the stores have dropped.

        Raises:
            BatonError: the engine ends.
        """
        self._steps.check_alive()
        known = {*self.adapters.known, *adapters}
        roots = frozenset(self._scheduler.root(cache_salt, adapter) for adapter in (None, *known))
        num_blocks = self._scheduler.drop_roots(roots)
        self._room_freed()
        if self._prefixes is None:
            return num_blocks, DroppedEntries()
        return num_blocks, await self._prefixes.drop_roots(roots)

    @property
    def loads(self) -> tuple[int, float]:
        """Tokens that were loaded from the stores so far, and the sum of the times that their loads took."""
        return (0, 0.0) if self._prefixes is None else (self._prefixes.loaded_tokens, self._prefixes.load_s)

    @property
    def has_tier(self) -> bool:
        """Whether `prefetch` can find anything."""
        return self._prefixes is not None

    async def load_adapter(self, name: str, adapter: Adapter) -> AdapterRef:
        """Loads an adapter next to the running steps; it replaces another revision of its name.

        Raises:
            Overloaded: no slot is free.
        """
        self._steps.check_alive()
        reference = AdapterRef(name, adapter.revision)
        if reference in self.adapters.loaded:
            return reference
        slot = self.adapters.take()
        try:
            await self._steps.device.load_adapter(slot, adapter)
        except BaseException:
            self.adapters.failed(slot)
            raise
        self.adapters.filled(slot, reference)
        return reference

    async def expert_counts(self) -> ExpertCounts:
        """The tokens that each expert's places have had since the start. Steps go on meanwhile."""
        self._steps.check_alive()
        return await self._steps.device.expert_counts()

    async def abort(self, request_id: str) -> None:
        """Ends the request in any phase. Returns when its blocks are free; no later event names it."""
        while self._scheduler.abort(request_id):
            await self._steps.step_ended()
        self._steps.wake()

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def leaked_blocks(self, knows: Callable[[str], bool]) -> int:
        """Leaked blocks: owned by no request, or by one that `knows` rejects."""
        return self._scheduler.leaked_blocks(knows)

    def _room_freed(self) -> None:
        self._steps.wake()
        if self._on_room is not None:
            self._on_room()

    def _with_slot(self, request: EngineRequest) -> EngineRequest:
        """The request with its adapter's current slot."""
        if request.adapter is None:
            return request
        return replace(request, adapter_slot=self.adapters.slot_of(request.adapter))

    def _prepare_grammar(self, request: EngineRequest) -> None:
        """Begins to compile the request's grammar; wakes the loop when a reserved request may run."""
        if (grammar := request.sampling.grammar) is None or request.stop_tokens is not None:
            return
        loop = asyncio.get_running_loop()

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._steps.wake)

        self._grammars.prepare(grammar).add_done_callback(wake)
