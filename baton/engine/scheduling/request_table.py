"""The requests of one engine, and what each holds: a place in the order, a seat, blocks and state slots. Pure.

Every change of a request's phase happens here; `Scheduler` decides when.
"""

from collections.abc import Callable

from baton.core.errors import InvalidRequest, Overloaded, UnknownLease
from baton.core.types import Grammar
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts, QueuePlace, context_limit
from baton.engine.request_checks import check_request
from baton.engine.scheduling.load import stream_blocks
from baton.engine.scheduling.prompts import RETRY_AFTER_S
from baton.engine.scheduling.request_blocks import OwnerPlace, RequestBlocks
from baton.engine.scheduling.roster import Roster
from baton.engine.scheduling.state import RequestPhase, RequestState
from baton.engine.scheduling.steps import Step, StepsInFlight


class RequestTable:
    """Gives seats and blocks to requests, and takes them back.

    Every running request has a seat, and there are no more seats than a step has tokens. So all decodes fit into every
    step, and a request in its prompt always finds budget. Reserved requests have no seat. A request that finds no free
    seat when its KV has arrived keeps its blocks and takes the next seat that becomes free. A stream that stalls after
    its first token is worse than one that starts late, so no request is reserved while one waits for a seat, or while
    as many are reserved as there are seats. A request runs only with blocks for all its known tokens. A decode without
    a free block preempts the running request of the last place, which is recomputed later; prefill-only requests are
    never preempted. From its first token on, a request has the earliest place among those of its priority that arrive
    later, whatever their deadlines, also while it waits after a preemption: then no ready request takes the seat that
    it could have.

    Args:
        is_pending: whether a grammar is still being compiled. A reserved request gets no seat until its grammar is
            compiled, because a step that draws its token would wait for that.
        offloads: see `RequestBlocks`.

    Attributes:
        void: ended requests that still have a row in a step in flight.
        preemptions: how many requests lost their blocks so far.
        on_end: called with each request that ends.
    """

    def __init__(
        self,
        limits: EngineLimits,
        facts: ModelFacts,
        *,
        is_pending: Callable[[Grammar], bool],
        offloads: bool = False,
    ) -> None:
        self.max_context_tokens = context_limit(limits, facts)
        self._limits = limits
        self._facts = facts
        self._block_size = facts.block_size
        self._is_pending = is_pending
        self.blocks = RequestBlocks(
            facts,
            prefix_cache=limits.prefix_cache,
            offloads=offloads,
        )
        self.roster = Roster(seats=limits.seats, may_run=self._may_run, num_pools=facts.num_owners)
        self.in_flight = StepsInFlight()
        self.void: list[RequestState] = []
        self.preemptions = 0
        self.on_end: Callable[[RequestState], None] | None = None

    def set_limits(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.roster.seats = limits.seats

    def leaked_blocks(self, knows: Callable[[str], bool]) -> int:
        """Leaked blocks and state slots: owned by no request, or by one that `knows` rejects."""
        known = [state for state in self.roster.everyone() if knows(state.request_id)]
        held = sum(len(state.blocks) + (state.state_slot >= 0) for state in (*known, *self.void))
        copied = 0 if self.blocks.offload is None else self.blocks.offload.num_held
        return self.blocks.num_references + self.blocks.states.slots.num_held - held - copied

    # ---- room

    def has_room(self, state: RequestState) -> bool:
        """Whether `state` could run at once, with a seat and blocks."""
        before = len(self.roster.waiting_before(state.place)) + len(self.roster.ready)
        return self.roster.free_seats > before and self.find_place(state) is not None

    def find_place(self, state: RequestState, *, arriving_tokens: int | None = None) -> OwnerPlace | None:
        """The pool with free blocks for `state` next to all requests that wait before it. Returns None if there is
        none."""
        before = self.roster.waiting_before(state.place)
        room = self.blocks.room(self.roster.decoders(), before)
        return self.blocks.place(state, room, before=len(before), arriving_tokens=arriving_tokens)

    def in_stream_share(self, state: RequestState) -> bool:
        """Whether `state` fits into the share of seats and blocks for requests that decode here."""
        before = self.roster.waiting_before(state.place)
        return self.blocks.needed(state) <= stream_blocks(self.roster, self.blocks, self._limits, before)

    def decoding(self, unsteady: list[RequestState], now: float) -> list[RequestState] | None:
        """The requests that decode in the next step, each with a slot for its token. Preempts the last requests where
        no block is free.

        Returns None and changes nothing when a preemption must wait for a step in flight.
        """
        block_size = self._block_size
        decoding = [state for state in unsteady if state.decoding]
        full = [state for state in decoding if state.num_scheduled == len(state.blocks) * block_size]
        if not self.blocks.add_one_each(full):
            if self.in_flight:
                return None
            for state in full:
                while state.phase is RequestPhase.RUNNING and not self.blocks.extend(state, state.num_scheduled + 1):
                    self.preempt(self.roster.last_decoder(state.pool), now)
        for state in decoding:
            if state.phase is RequestPhase.RUNNING:
                # Not beyond the block of the next token: rows do not have the blocks yet that drafts were given.
                state.steady_stop = min(state.decode_stop, (state.num_scheduled // block_size + 1) * block_size)
                state.shared_row = None
        if len(decoding) < len(unsteady):
            return [state for state in self.roster.running if state.num_scheduled < state.steady_stop]
        return self.roster.running[:]

    def end_oldest_step(self) -> Step:
        """Removes the oldest step. Ended requests without a row in the next step give their blocks back."""
        step = self.in_flight.end_oldest()
        if self.void:
            void, self.void = self.void, []
            for state in void:
                self._give_back(state)
        return step

    # ---- phases

    def new_state(self, request: EngineRequest, now: float) -> RequestState:
        if self.roster.find(request.request_id) is not None:
            raise InvalidRequest(
                f"request {request.request_id} already exists", field="request_id", value=request.request_id
            )
        check_request(
            request,
            vocab_size=self._facts.vocab_size,
            max_context_tokens=self.max_context_tokens,
        )
        return RequestState(
            request,
            place=QueuePlace.of(request, arrival=self.roster.arrivals, now=now),
            queued_at=now,
            keys=self.blocks.search.keys(request),
            eos_token_ids=self._facts.eos_token_ids,
            max_context_tokens=self.max_context_tokens,
        )

    def reserved(self, request_id: str) -> RequestState:
        state = self.roster.find(request_id)
        if state is None or state.phase is not RequestPhase.RESERVED:
            raise UnknownLease(f"request {request_id} holds no reservation", field="request_id", value=request_id)
        return state

    def preempt(self, state: RequestState, now: float) -> None:
        """Takes the blocks of a request. Its tokens stay, and their KV is recomputed when there is room."""
        assert not self.in_flight.has_row_of(state), "a step in flight writes to its blocks"
        if state.started:
            self.begin(state)
            state.queued_at = now
        self.roster.wait(state)
        self.blocks.preempt(state)
        self.preemptions += 1

    def begin(self, state: RequestState) -> None:
        """Marks the request as begun: its first token is no longer due, and newcomers go after it."""
        state.due_s = None
        self.roster.move(state, state.place.as_begun())

    def fill_seats(self) -> None:
        """Lets ready requests run. It keeps a seat for a preempted request that goes before them if its blocks are
        free."""
        roster = self.roster
        if not roster.ready or not roster.free_seats:
            return
        kept, room = 0, self.blocks.room(roster.decoders())
        for state in roster.waiting_before(roster.ready[0].place):
            place = self.blocks.place(state, room, before=kept) if state.place.begun else None
            if place is None:
                break
            kept += 1
            room[place.pool] -= self.blocks.needed(state)
        roster.fill_seats(kept=kept)

    def _may_run(self, state: RequestState) -> bool:
        grammar = state.request.sampling.grammar
        return grammar is None or not self._is_pending(grammar)

    def stop_running(self, state: RequestState) -> None:
        """Ends the computation of a running request. A `prefill_only` request keeps its blocks, unless its states are
        pooled: then nobody reads its KV."""
        if state.prefill_only and state.pooling is None:
            self.roster.hold(state)
        else:
            self.end(state)

    def end(self, state: RequestState) -> None:
        """Ends the request. No later event names it."""
        self.roster.end(state)
        if self.on_end is not None:
            self.on_end(state)
        self._give_back(state)

    def _give_back(self, ended: RequestState) -> None:
        """Frees the blocks now, or when the last step in flight that writes to them ends."""
        if self.in_flight.has_row_of(ended):
            self.void.append(ended)
        else:
            self.blocks.end(ended)


def overloaded(message: str) -> Overloaded:
    return Overloaded(message, cure="retry later", retry_after_s=RETRY_AFTER_S)
