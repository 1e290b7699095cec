"""Schedules steps: which requests run in the next step, with which blocks, and what a step's end means for them. Pure.

A step is in flight from `schedule` until `complete` or `fail`; meanwhile one more step may be scheduled, and requests
may come and go. Times are arguments.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from baton.core.block_keys import adapted_identity, root_digest
from baton.core.errors import BatonError
from baton.core.types import AdapterRef, Grammar, PromptLogprob
from baton.engine.batch import Batch, LayerDrafts, RowResult
from baton.engine.events import RequestFailed, StepEvents
from baton.engine.pooling import PooledRows
from baton.engine.request import EngineLimits, EngineLoad, EngineRequest, ModelFacts
from baton.engine.scheduling.costs import Costs, NoCosts
from baton.engine.scheduling.decode_order import DecodeOrder
from baton.engine.scheduling.drafts import Drafts
from baton.engine.scheduling.ended_steps import EndedSteps
from baton.engine.scheduling.entry_plans import LoadPlan, WantedPrefix
from baton.engine.scheduling.load import engine_load
from baton.engine.scheduling.offload import Offload
from baton.engine.scheduling.prefixes import PrefixCache
from baton.engine.scheduling.prompts import Prompts
from baton.engine.scheduling.request_table import RequestTable, overloaded
from baton.engine.scheduling.reservations import Reservations
from baton.engine.scheduling.state import RequestPhase
from baton.engine.scheduling.steps import NextStep, Step
from baton.engine.speculation.speculator import Speculator

_NO_SCORES: Mapping[int, Sequence[PromptLogprob]] = MappingProxyType({})
_NO_POOLS: PooledRows = MappingProxyType({})


class Scheduler:
    """Continuous batching with chunked prefill over one cache, one step ahead of the device.

    `RequestTable` describes seats, blocks and preemptions. Waiting requests run in the order of their places; none
    overtakes another, but a request that cannot meet its deadline falls back (`prompts`). Prompts share a step in the
    same order, whether they run already or not; but no running request loses its blocks to a waiting one. A request
    waits as long as ones of better priority keep coming. A step that decodes takes only as many prompt tokens as its
    bound allows (`slices`).

    The step after one in flight continues where that one will end: with the next chunk of a prompt, or with a token
    that is still being drawn. A request that will certainly end with the step in flight gets no row in the next one. A
    request that ends there unexpectedly (stop token, abort, failure) has a void row in the next step. The row causes no
    event, but it writes KV, so its blocks stay held until no step in flight has a row of the request.

    Attributes:
        reservations: requests whose KV comes from elsewhere.
    """

    def __init__(
        self,
        limits: EngineLimits,
        facts: ModelFacts,
        meter: Costs | None = None,
        *,
        is_pending: Callable[[Grammar], bool] = lambda _: False,
        offloads: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self._limits = limits
        self._facts = facts
        self._meter = meter or NoCosts()
        self._block_size = facts.block_size
        self._requests = RequestTable(limits, facts, is_pending=is_pending, offloads=offloads)
        self.max_context_tokens = self._requests.max_context_tokens
        self._roster = self._requests.roster
        self._blocks = self._requests.blocks
        self._in_flight = self._requests.in_flight
        self._decode_order = DecodeOrder()
        self._drafts: Drafts | None = None
        self._waits = False  # the next step, until the one in flight has ended
        if speculator is not None:
            self._drafts = Drafts(
                speculator, self._roster, self._blocks, self._meter, seats=limits.seats, has_layer=facts.drafts
            )
            self._requests.on_end = self._drafts.end
        self.reservations = Reservations(self._requests, self._drafts, facts)
        self._ended = EndedSteps(self._requests, self._meter, self._drafts, block_size=facts.block_size)
        self._prompts = Prompts(self._roster, self._blocks, limits, self._meter, stop=self._requests.stop_running)

    def set_limits(self, limits: EngineLimits) -> None:
        """Replaces the limits from the next step on."""
        self._limits = limits
        if self._drafts is not None:
            self._drafts.seats = limits.seats
        self._requests.set_limits(limits)
        self._prompts.set_limits(limits)

    @property
    def prefix_cache(self) -> PrefixCache:
        """The prefix cache, for followers of its contents."""
        return self._blocks.prefixes

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def predicted_s(self) -> float | None:
        """The predicted time of the oldest step in flight. Returns None if there is no step, or costs are unknown."""
        costs = self._meter.costs
        if costs is None or not self._in_flight:
            return None
        return costs.seconds(self._in_flight.oldest.work)

    @property
    def computes_prompts(self) -> bool:
        """Whether the oldest step in flight computes prompts."""
        return bool(self._in_flight) and self._in_flight.oldest.work.prompt_tokens > 0

    def uses_adapter(self, slot: int) -> bool:
        """Whether a request uses the adapter in this slot."""
        return any(state.request.adapter_slot == slot for state in self._roster.everyone())

    # ---- requests come and go

    def submit(self, request: EngineRequest, now: float) -> None:
        """Takes a request whose prompt is computed here.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room now, and `max_waiting` requests wait already; or it has `refuse_late` and would be late
                even if it were computed next.
        """
        state = self._requests.new_state(request, now)
        state.score_prompt()
        self._prompts.check_in_time(state, now)
        if len(self._roster.waiting) >= self._limits.max_waiting and not self._requests.has_room(state):
            raise overloaded(f"{len(self._roster.waiting)} requests wait for room already")
        self._roster.enter(state, RequestPhase.WAITING)

    def abort(self, request_id: str) -> bool:
        """Ends the request in any phase. Returns True while a step in flight still writes to its blocks."""
        if (state := self._roster.find(request_id)) is not None:
            self._requests.end(state)
            self._requests.fill_seats()
        return any(ended.request_id == request_id for ended in self._requests.void)

    def fail_all(self, error: BatonError) -> StepEvents:
        """Ends every step in flight and every request. Returns a failure for each request that was not held."""
        while self._in_flight:
            self._blocks.states.end_snapshots(self._requests.end_oldest_step(), None)
        everyone = self._roster.everyone()
        failed = tuple(
            RequestFailed(state.request_id, error) for state in everyone if state.phase is not RequestPhase.HELD
        )
        for state in everyone:
            self._requests.end(state)
        return StepEvents(self._in_flight.launched, 0.0, failed=failed)

    # ---- steps

    def schedule(self, now: float) -> Batch | None:
        """The next step. Returns None when no request can run, or two steps are in flight.

        Also returns None when a decode finds no free block while a step is in flight, because a preempted request must
        not be in one, and when the next step is worth the wait for the tokens of the one in flight (`drafts`).
        """
        if self._in_flight.full:
            return None
        if self._in_flight and self._must_wait(self._in_flight.oldest):
            self._waits = True
            return None
        late, self._waits = self._waits, False
        self._requests.fill_seats()
        preemptions = self._requests.preemptions
        # All other requests decode as before. A pass over all requests costs time in every step, so there is only one.
        unsteady = [state for state in self._roster.running if state.num_scheduled >= state.steady_stop]
        decoding = self._requests.decoding(unsteady, now)
        if decoding is None:
            return None
        unit = self._blocks.states.unit
        step = NextStep(
            self._in_flight.launched + 1, self._limits, block_size=self._block_size, now=now, state_unit=unit
        )
        # A request is unsteady wherever a block begins, so also where a state is kept.
        self._blocks.states.begin_decoded(step, [state for state in unsteady if state.decoding])
        step.late = late
        drafts = self._drafts.choose(decoding) if self._drafts is not None and not self._in_flight else {}
        if drafts:
            decoding = [state for state in decoding if state not in drafts]
        placed = self._decode_order.place(decoding)
        step.add_decodes(placed, self._decode_order.work, ahead=bool(self._in_flight))
        step.add_drafts(drafts)
        if self._drafts is not None and (late or drafts):
            step.wait_s = self._drafts.wait_s(step)
        self._blocks.states.begin_drafts(step)
        prompts = [state for state in unsteady if state.prefilling and state.phase is RequestPhase.RUNNING]
        # A step that preempted a request admits no new ones.
        self._prompts.add_to(step, prompts, now, admit=self._requests.preemptions == preemptions)
        self._blocks.states.begin_snapshots(step)
        if self._drafts is not None:
            self._drafts.ask_layer(step)
        return self._in_flight.launch(step) if step.rows else None

    def _must_wait(self, running: Step) -> bool:
        """Whether the next step must not be prepared before this one, the only one in flight, has ended."""
        return running.unfolds or running.waits_for_layer or (self._drafts is not None and self._drafts.waits(running))

    def take_refused(self) -> StepEvents | None:
        """The requests that `schedule` refused since the last call, because they cannot meet their deadline."""
        refused = self._prompts.take_refused()
        return StepEvents(self._in_flight.launched, 0.0, failed=refused) if refused else None

    def layers_computed(self, layer_stop: int, index_stop: int = 0) -> StepEvents:
        """Reports that the oldest step in flight has computed its first layers. Returns events for requests that ask
        for marks."""
        return self._in_flight.oldest.layers_computed(layer_stop, index_stop)

    def complete(
        self,
        results: Sequence[RowResult],
        seconds: float,
        scores: Mapping[int, Sequence[PromptLogprob]] = _NO_SCORES,
        pools: PooledRows = _NO_POOLS,
        layer_drafts: LayerDrafts | None = None,
        waited_s: float | None = None,
        *,
        shares_keys: bool = False,
    ) -> StepEvents:
        """Ends the oldest step in flight: updates its requests and returns its events.

        Args:
            results: what each row yields, see `RowResult`.
            scores: the logprobs that `Batch.scores` asks for, by row.
            pools: the sums that `Batch.pools` asks for, by row.
            layer_drafts: the drafts that `Batch.num_layer_drafts` asks for; None: the model has no layer for them.
            waited_s: since the step before ended, without the time in which the device computed. None: unknown.
            shares_keys: whether the step read keys that many rows share only once.
        """
        ended = self._in_flight.oldest
        self._waits = self._waits or ended.unfolds or ended.waits_for_layer
        return self._ended.complete(results, seconds, scores, pools, layer_drafts, waited_s, shares_keys=shares_keys)

    def fail(self, error: BatonError, seconds: float) -> StepEvents:
        """Fails the oldest step in flight: its requests end with `error`. Their rows in the next step are void.

        A prefill-only request keeps its blocks until `abort`, unless its hidden states are pooled: KV of earlier chunks
        may be read from them meanwhile.
        """
        return self._ended.fail(error, seconds)

    # ---- stores outside of the cache

    @property
    def offload(self) -> Offload | None:
        """The entries that were finished, and those to drop. None if there are no stores."""
        return self._blocks.offload

    def wanted(self, request: EngineRequest) -> WantedPrefix | None:
        """The entries that the cache lacks for a request that arrives. Returns None if there are none."""
        return self._blocks.search.wanted(request)

    def begin_load(self, wanted: WantedPrefix, pool: int, *, stop: int) -> LoadPlan | None:
        """Holds blocks for the wanted entries before `stop` that the cache still lacks, as far as there is room next to
        the requests that decode. Returns None if there are none."""
        return self._blocks.begin_load(wanted, pool, stop=stop, spare=self._roster.decoders()[pool])

    def entry_s(self, plan: LoadPlan) -> float:
        """The predicted time to compute what a load spares, for each of its entries; a state alone counts as one.
        Returns infinity while costs are unknown."""
        costs = self._meter.costs
        if costs is None:
            return math.inf
        seconds = costs.prompt_s(*plan.spared, step_tokens=self._limits.max_batch_tokens)
        return seconds / max(1, len(plan.entries.keys))

    def drop_roots(self, roots: frozenset[bytes]) -> int:
        """Lets no request find what sequences with one of these roots have left in the prefix cache. Returns the number
        of blocks. Requests that run go on, and leave nothing either."""
        if self._blocks.offload is not None:
            self._blocks.offload.drop_roots(roots)
        if self._drafts is not None:
            self._drafts.drop_roots(roots)
        return self._blocks.drop_roots(roots, self._roster.everyone())

    def root(self, cache_salt: str, adapter: AdapterRef | None) -> bytes:
        """The root of sequences with this salt and adapter."""
        return root_digest(adapted_identity(self._facts.identity, adapter), cache_salt)

    def load(self) -> EngineLoad:
        return engine_load(
            self._roster,
            self._blocks,
            self._prompts,
            self._limits,
            preemptions=self._requests.preemptions,
            pace=None if self._drafts is None else self._drafts.pace,
        )

    def leaked_blocks(self, knows: Callable[[str], bool]) -> int:
        """Leaked blocks and state slots: owned by no request, or by one that `knows` rejects."""
        return self._requests.leaked_blocks(knows)
