"""Which requests run in the next step, with which blocks, and what a finished step means for them. Pure.

Knows no tensors, no clock (times come in as arguments) and no thread. Between `schedule` and the `complete` or `fail`
of the same step it is in flight, and one more may be scheduled behind it; requests may come and go meanwhile.
"""

from collections.abc import Sequence

from baton.errors import BatonError, InvalidRequest, Overloaded, UnknownLease
from baton.types import FinishReason, TokenOutput
from engine.batch import Batch
from engine.events import ChunkComputed, RequestFailed, RequestStarted, StepEvents, token_sampled
from engine.request import (
    EngineLimits,
    EngineLoad,
    EngineRequest,
    ModelFacts,
    Reservation,
    check_first_token,
    check_request,
    context_limit,
)
from engine.scheduling.in_flight import Step, StepsInFlight
from engine.scheduling.next_step import NextStep
from engine.scheduling.places import Places
from engine.scheduling.request_blocks import RequestBlocks
from engine.scheduling.roster import Roster
from engine.scheduling.state import NO_END, Phase, RequestState


class Scheduler:
    """Continuous batching with chunked prefill over one cache, one step ahead of the device.

    Every running or reserved request has a seat, and there are no more seats than a step has tokens. So all decodes
    fit into every step, and a request that is still in its prompt always finds budget left.
    A request runs only with blocks for all its known tokens; a decode that finds no further block sends the latest
    request back to be recomputed, never a prefill-only one.

    The step behind one in flight goes on where that one will be: with the next chunk of a prompt, or with a token that
    is still being drawn. Whoever ends with the step in front for certain has no row in it. Whoever turns out to have
    ended there (a stop token, an abort, a failure) leaves a void row behind: nothing is told of it, but it writes to
    its blocks, so those stay held until no step in flight has a row of the request.
    """

    def __init__(self, limits: EngineLimits, facts: ModelFacts) -> None:
        self.max_context_tokens = context_limit(limits, facts)
        self._limits = limits
        self._facts = facts
        self._block_size = facts.block_size
        align_tokens = limits.chunk_align_tokens or 1
        self._blocks = RequestBlocks(facts, prefix_cache=limits.prefix_cache, align_tokens=align_tokens)
        self._roster = Roster(seats=min(limits.max_batch_requests, limits.max_batch_tokens))
        self._in_flight = StepsInFlight()
        self._places = Places()
        self._ended: list[RequestState] = []  # who ended, and has a row in flight
        self._preemptions = 0

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    # ---- requests come

    def submit(self, request: EngineRequest, now: float) -> None:
        """Takes a request that is computed here from its first token on.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room now, and `max_waiting` others wait already.
        """
        state = self._new_state(request, now)
        if len(self._roster.waiting) >= self._limits.max_waiting and not self._has_room(state):
            raise self._overloaded(f"{len(self._roster.waiting)} requests wait for room already")
        self._roster.enter(state, Phase.WAITING)

    def reserve(self, request: EngineRequest, now: float) -> Reservation:
        """Holds a seat and all blocks for a request whose KV comes from elsewhere. Nobody else can match these blocks.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room beside the running requests and those that wait.
        """
        assert not request.prefill_only, "KV is reserved for where it is decoded"
        state = self._new_state(request, now)
        if not self._has_room(state):
            raise self._overloaded("no room for the request's blocks")
        self._blocks.take(state, self._blocks.cached(state))
        self._roster.enter(state, Phase.RESERVED)
        return self._blocks.reservation(state)

    def extend_reserved(self, request_id: str, output: tuple[int, ...]) -> Reservation:
        """The reserved request goes on behind `output`, which is all of its output so far; blocks may be added.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had, or leaves nothing to decode.
            Overloaded: no block left; the reservation stays as it was.
        """
        state = self._reserved_state(request_id)
        state.check_continuation(output, vocab_size=self._facts.vocab_size, max_context_tokens=self.max_context_tokens)
        if not self._blocks.extend(state, len(state.request.prompt) + len(output) + 1):
            raise self._overloaded("no room for another block")
        state.replace_output(output)
        return self._blocks.reservation(state)

    def admit(self, request_id: str, first: TokenOutput) -> FinishReason | None:
        """The KV of all known tokens of a reserved request is in its blocks: it decodes behind `first` from now on.

        Returns why, when `first` is also its last token; then the request is over and its blocks are free.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `first` is not the request's next token.
        """
        state = self._reserved_state(request_id)
        check_first_token(first, index=state.num_output, vocab_size=self._facts.vocab_size)
        self._blocks.fill(state)
        self._roster.run(state)
        if (end := state.append(first.token_id)) is not NO_END:
            self._end(state)
        return end.reason

    def prefill_here(self, request_id: str, output: tuple[int, ...], now: float) -> None:
        """A reserved request computes all but its cached tokens here. `output` is all of its output so far.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `output` does not continue what the request had, or leaves nothing to decode.
        """
        state = self._reserved_state(request_id)
        state.check_continuation(output, vocab_size=self._facts.vocab_size, max_context_tokens=self.max_context_tokens)
        state.replace_output(output)
        state.queued_at = now
        self._roster.run(state)
        if not self._blocks.extend(state, state.num_tokens + 1):
            self._send_back(state)

    # ---- requests go

    def abort(self, request_id: str) -> bool:
        """Ends the request, whatever it does. True as long as its blocks, or those of one that ended, are in a step."""
        if (state := self._roster.find(request_id)) is not None:
            self._end(state)
        return self._in_flight.has_row_named(request_id)

    def fail_all(self, error: BatonError) -> StepEvents:
        """Ends every request and every step in flight, and tells of those that had not ended before."""
        while self._in_flight:
            self._land()
        everyone = self._roster.everyone()
        failed = tuple(RequestFailed(state.request_id, error) for state in everyone if state.phase is not Phase.HELD)
        for state in everyone:
            self._end(state)
        return StepEvents(self._in_flight.launched, 0.0, failed=failed)

    # ---- steps

    def schedule(self, now: float) -> Batch | None:
        """The next step, single-token rows first; None when nobody can run, or two steps are in flight.

        None also when a decode finds no block while a step is in flight: who is sent back must not be in one.
        """
        if self._in_flight.full:
            return None
        preemptions = self._preemptions
        # All others decode as they did. Every look at all requests in every step adds up, so there is one.
        unsteady = [state for state in self._roster.running if state.num_scheduled >= state.steady_stop]
        decoding = self._decoding(unsteady)
        if decoding is None:
            return None
        step = NextStep(self._in_flight.launched + 1, self._limits, block_size=self._block_size, now=now)
        step.add_decodes(self._places.seat(decoding))
        for state in unsteady:
            if state.prefilling and state.phase is Phase.RUNNING:
                step.add_chunk(state)
        # A step that sent somebody back has no room to give away.
        while self._preemptions == preemptions and (admitted := self._admit_waiting(step.budget)) is not None:
            step.add_chunk(admitted)
        return self._in_flight.launch(step) if step.rows else None

    def layers_computed(self, layer_stop: int) -> StepEvents:
        """The oldest step in flight has computed its first layers: tells those who want to know."""
        return self._in_flight.oldest.layers_computed(layer_stop)

    def complete(self, results: Sequence[TokenOutput | None], seconds: float) -> StepEvents:
        """The oldest step in flight is over; `results` are its rows' tokens, None where a row drew none."""
        started: list[RequestStarted] = []
        chunks: list[ChunkComputed] = []
        told: list[tuple[str, TokenOutput, FinishReason | None, str]] = []
        block_size, ended = self._block_size, Phase.ENDED  # looked up once, not for every row
        step = self._land()
        for state, row, token in zip(step.states, step.rows, results, strict=True):
            if state.phase is ended:
                continue
            start = state.num_computed
            state.num_computed = stop = start + len(row.token_ids)
            if start < state.prefill_stop:
                chunks.append(ChunkComputed(state.request_id, start, stop, tuple(state.blocks)))
                if state.request_id in step.started:
                    started.append(step.started[state.request_id])
            if stop // block_size > start // block_size:
                self._blocks.register(state)
            if token is None:
                continue
            state.num_pending -= 1
            state.tokens.append(token.token_id)
            reason, stop_reason = None, ""
            if stop >= state.decode_stop or token.token_id in state.end_token_ids:  # only then it may end
                reason, stop_reason = state.end_at(token.token_id)
                if reason is not None or state.prefill_only:
                    self._stop_running(state)
            told.append((state.request_id, token, reason, stop_reason))
        return StepEvents(step.number, seconds, tuple(started), tuple(chunks), tuple(map(token_sampled, told)))

    def fail(self, error: BatonError, seconds: float) -> StepEvents:
        """The oldest step in flight came to nothing: its requests end with `error`; their rows in the next are void."""
        step = self._land()
        failed = [state for state in step.states if state.phase is not Phase.ENDED]
        for state in failed:
            self._end(state)
        events = tuple(RequestFailed(state.request_id, error) for state in failed)
        return StepEvents(step.number, seconds, failed=events)

    def load(self) -> EngineLoad:
        return EngineLoad(
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_leased=self._roster.num_leased,
            requests_running=len(self._roster.running),
            requests_waiting=len(self._roster.waiting),
            tokens_waiting=self._roster.tokens_waiting,
            requests_total=self._roster.arrivals,
            preemptions=self._preemptions,
        )

    # ---- room

    def _has_room(self, state: RequestState) -> bool:
        """Room for `state` beside the running requests, the reserved ones, and all that wait before it."""
        if self._roster.free_seats <= len(self._roster.waiting):
            return False
        waiting = sum(map(self._blocks.needed, self._roster.waiting))
        return self._blocks.fits(state, self._blocks.cached(state), spare=self._roster.num_decoders + waiting)

    def _admit_waiting(self, budget: int) -> RequestState | None:
        """Lets the first waiting request run, if there is room for it and its chunk; others never pass it."""
        if not self._roster.waiting or not self._roster.free_seats:
            return None
        state = self._roster.waiting[0]
        cached = self._blocks.cached(state)
        if not self._blocks.fits(state, cached, spare=self._roster.num_decoders):
            return None
        if not self._limits.chunk_tokens(len(cached) * self._block_size, state.num_tokens, budget):
            return None
        self._blocks.take(state, cached)
        self._roster.run(state)
        return state

    def _decoding(self, unsteady: list[RequestState]) -> list[RequestState] | None:
        """Who decodes in the next step, with a slot for it; for want of one the latest requests are sent back.

        None, and nothing is changed, when that has to wait for a step in flight.
        """
        block_size = self._block_size
        decoding = [state for state in unsteady if state.decoding]
        full = [state for state in decoding if state.num_scheduled == len(state.blocks) * block_size]
        if len(full) > self._blocks.num_free and self._in_flight:
            return None
        for state in full:
            while state.phase is Phase.RUNNING and not self._blocks.extend(state, state.num_scheduled + 1):
                self._send_back(self._roster.latest_decoder)
        for state in decoding:
            if state.phase is Phase.RUNNING:
                state.steady_stop = min(state.decode_stop, len(state.blocks) * block_size)
                state.shared_row = None
        if len(decoding) < len(unsteady):
            return [state for state in self._roster.running if state.num_scheduled < state.steady_stop]
        return self._roster.running[:]

    def _land(self) -> Step:
        """The oldest step is in flight no more; who ended meanwhile, and has no row in the next, loses its blocks."""
        step = self._in_flight.land()
        if self._ended:
            ended, self._ended = self._ended, []
            for state in ended:
                self._drop(state)
        return step

    # ---- changes of state

    def _new_state(self, request: EngineRequest, now: float) -> RequestState:
        if self._roster.find(request.request_id) is not None:
            raise InvalidRequest(
                f"request {request.request_id} is here already", field="request_id", value=request.request_id
            )
        check_request(request, vocab_size=self._facts.vocab_size, max_context_tokens=self.max_context_tokens)
        return RequestState(
            request,
            queued_at=now,
            keys=self._blocks.keys(request),
            eos_token_ids=self._facts.eos_token_ids,
            max_context_tokens=self.max_context_tokens,
        )

    def _reserved_state(self, request_id: str) -> RequestState:
        state = self._roster.find(request_id)
        if state is None or state.phase is not Phase.RESERVED:
            raise UnknownLease(f"request {request_id} holds no reservation", field="request_id", value=request_id)
        return state

    def _send_back(self, state: RequestState) -> None:
        """Takes the blocks of a running request; its tokens stay, their KV is recomputed when there is room."""
        assert not self._in_flight.has_row_of(state), "a step in flight writes to its blocks"
        self._roster.wait_first(state)
        self._blocks.give_back(state)
        self._preemptions += 1

    def _stop_running(self, state: RequestState) -> None:
        """It has its last token here."""
        if state.prefill_only:
            self._roster.hold(state)
        else:
            self._end(state)

    def _end(self, state: RequestState) -> None:
        """It is told of no more. Its blocks are free, unless a step in flight writes to them: then when that lands."""
        self._roster.end(state)
        self._drop(state)

    def _drop(self, ended: RequestState) -> None:
        if self._in_flight.has_row_of(ended):
            self._ended.append(ended)
        else:
            self._blocks.give_back(ended)

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, cure="try again later", retry_after_s=self._limits.retry_after_s)
