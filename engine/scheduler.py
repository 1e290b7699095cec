"""Which requests run in the next step, with which blocks, and what a finished step means for them. Pure.

Knows no tensors, no clock (times come in as arguments) and no thread. Between `schedule` and the `complete` or `fail`
that follows it one step is in flight; requests may come and go meanwhile, and the step's blocks stay held.
"""

import bisect
from collections import deque
from collections.abc import Sequence

from baton.errors import BatonError, InternalError, InvalidRequest, Overloaded, UnknownLease
from baton.types import FinishReason, TokenOutput
from engine.batch import Batch
from engine.events import ChunkComputed, RequestFailed, RequestStarted, StepEvents, TokenSampled
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
from engine.request_blocks import RequestBlocks
from engine.state import Phase, RequestState, Scheduled, num_leased, tokens_waiting


class Scheduler:
    """Continuous batching with chunked prefill over one cache.

    Every running or reserved request has a seat, and there are no more seats than a step has tokens. So all decodes
    fit into every step, and a request that is still in its prompt always finds at least one token of budget left.
    A request runs only with blocks for all its known tokens; a decode that finds no further block sends the latest
    request back to be recomputed, never a prefill-only one.
    """

    def __init__(self, limits: EngineLimits, facts: ModelFacts) -> None:
        self.max_context_tokens = context_limit(limits, facts)
        self._limits = limits
        self._facts = facts
        self._block_size = facts.block_size
        self._seats = min(limits.max_batch_requests, limits.max_batch_tokens)
        self._blocks = RequestBlocks(facts, prefix_cache=limits.prefix_cache)
        self._requests: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []  # in order of arrival
        self._num_reserved = 0
        self._in_flight: list[Scheduled] = []
        self._steps = 0
        self._arrivals = 0
        self._preemptions = 0

    # ---- requests come

    def submit(self, request: EngineRequest, now: float) -> None:
        """Takes a request that is computed here from its first token on.

        Raises:
            InvalidRequest: it could never run.
            Overloaded: no room now, and `max_waiting` others wait already.
        """
        state = self._new_state(request, now)
        if len(self._waiting) >= self._limits.max_waiting and not self._has_room(state):
            raise self._overloaded(f"{len(self._waiting)} requests wait for room already")
        self._enter(state)
        self._waiting.append(state)

    def can_reserve(self, request: EngineRequest) -> bool:
        """Whether `reserve` would find room. Raises InvalidRequest as it does."""
        return self._has_room(self._new_state(request, 0.0))

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
        state.phase = Phase.RESERVED
        self._num_reserved += 1
        self._enter(state)
        return state.reservation()

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
        return state.reservation()

    def admit(self, request_id: str, first: TokenOutput) -> FinishReason | None:
        """The KV of all known tokens of a reserved request is in its blocks: it decodes behind `first` from now on.

        Returns why, when `first` is also its last token; then the request is over and its blocks are free.

        Raises:
            UnknownLease: no such reservation.
            InvalidRequest: `first` is not the request's next token.
        """
        state = self._reserved_state(request_id)
        check_first_token(first, index=state.num_output, vocab_size=self._facts.vocab_size)
        state.num_computed = state.prefill_stop = state.num_tokens
        self._blocks.register(state)
        self._run(state)
        state.started = True
        return self._append(state, first.token_id)[0]

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
        self._run(state)
        if not self._blocks.extend(state, state.num_tokens + 1):
            self._send_back(state)

    # ---- requests go

    def abort(self, request_id: str) -> bool:
        """Ends the request, whatever it does. Returns True when its blocks are free only after the step in flight."""
        state = self._requests.get(request_id)
        if state is None:
            return False
        if any(state is scheduled.state for scheduled in self._in_flight):
            state.ending = True
            return True
        self._remove(state)
        return False

    def release(self, request_id: str) -> None:
        """Gives back the blocks of a prefilled request; they stay in the prefix cache. Unknown ids are ignored."""
        state = self._requests.get(request_id)
        if state is None:
            return
        if state.phase is not Phase.HELD:
            raise InternalError(f"request {request_id} is released while {state.phase.value}", cure="abort it instead")
        self._remove(state)

    def fail_all(self, error: BatonError) -> StepEvents:
        """Ends every request, also those of a step in flight, and tells of those that had not ended before."""
        self._in_flight = []
        states = list(self._requests.values())
        for state in states:
            self._remove(state)
        unfinished = [state for state in states if state.phase is not Phase.HELD and not state.ending]
        failed = tuple(RequestFailed(state.request_id, error) for state in unfinished)
        return StepEvents(self._steps, 0.0, failed=failed)

    # ---- steps

    def schedule(self, now: float) -> Batch | None:
        """The next step, or None when nobody can run. Single-token rows first."""
        assert not self._in_flight, "one step at a time"
        preemptions = self._preemptions
        for state in [state for state in self._running if not state.prefilling]:
            if state.phase is Phase.RUNNING and self._grow(state):
                self._add_row(state, 1, None)
        budget = self._limits.max_batch_tokens - len(self._in_flight)
        for state in self._running:
            if budget and state.prefilling:
                budget -= self._add_chunk(state, budget, now)
        # A step that sent somebody back has no room to give away.
        while budget and self._preemptions == preemptions and (admitted := self._admit_waiting()) is not None:
            budget -= self._add_chunk(admitted, budget, now)
        if not self._in_flight:
            return None
        self._in_flight.sort(key=lambda scheduled: len(scheduled.row.token_ids) > 1)
        self._steps += 1
        return Batch(self._steps, tuple(scheduled.row for scheduled in self._in_flight))

    def complete(self, results: Sequence[TokenOutput | None], seconds: float) -> StepEvents:
        """The step in flight is over; `results` are its rows' tokens, None where a row drew none."""
        started: list[RequestStarted] = []
        chunks: list[ChunkComputed] = []
        tokens: list[TokenSampled] = []
        for (state, row, start), token in zip(self._take_in_flight(), results, strict=True):
            was_prefilling = state.prefilling
            state.num_computed = row.token_stop
            self._blocks.register(state)
            if state.ending:
                self._remove(state)
                continue
            if start is not None:
                started.append(start)
            if was_prefilling:
                chunks.append(ChunkComputed(state.request_id, row.token_start, row.token_stop, tuple(state.blocks)))
            if token is not None:
                tokens.append(TokenSampled(state.request_id, token, *self._append(state, token.token_id)))
        return StepEvents(self._steps, seconds, tuple(started), tuple(chunks), tuple(tokens))

    def fail(self, error: BatonError, seconds: float) -> StepEvents:
        """The step in flight came to nothing: its requests end with `error`."""
        failed: list[RequestFailed] = []
        for scheduled in self._take_in_flight():
            if not scheduled.state.ending:
                failed.append(RequestFailed(scheduled.state.request_id, error))
            self._remove(scheduled.state)
        return StepEvents(self._steps, seconds, failed=tuple(failed))

    def load(self) -> EngineLoad:
        return EngineLoad(
            blocks_total=self._blocks.num_blocks,
            blocks_free=self._blocks.num_free,
            blocks_leased=num_leased(self._requests.values()),
            requests_running=len(self._running),
            requests_waiting=len(self._waiting),
            tokens_waiting=tokens_waiting(self._waiting, self._running),
            requests_total=self._arrivals,
            preemptions=self._preemptions,
        )

    # ---- room

    def _has_room(self, state: RequestState) -> bool:
        """Room for `state` beside the running requests, the reserved ones, and all that wait before it."""
        if len(self._running) + self._num_reserved + len(self._waiting) >= self._seats:
            return False
        waiting = sum(self._blocks.needed(other) for other in self._waiting)
        return self._blocks.fits(state, self._blocks.cached(state), spare=self._headroom() + waiting)

    def _headroom(self) -> int:
        """One block for each running decode, so that a newcomer is not the next to be sent back."""
        return sum(1 for state in self._running if not state.request.prefill_only)

    def _admit_waiting(self) -> RequestState | None:
        """Lets the first waiting request run, if there is room; others never pass it."""
        if not self._waiting or len(self._running) + self._num_reserved >= self._seats:
            return None
        state = self._waiting[0]
        cached = self._blocks.cached(state)
        if not self._blocks.fits(state, cached, spare=self._headroom()):
            return None
        self._waiting.popleft()
        self._blocks.take(state, cached)
        self._run(state)
        return state

    def _grow(self, state: RequestState) -> bool:
        """Finds a block for the token that `state` decodes; False when `state` itself had to be sent back for it."""
        while not self._blocks.extend(state, state.num_tokens):
            latest = next(other for other in reversed(self._running) if not other.request.prefill_only)
            self._send_back(latest)
            if latest is state:
                return False
        return True

    # ---- changes of state

    def _new_state(self, request: EngineRequest, now: float) -> RequestState:
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request {request.request_id} is here already", field="request_id", value=request.request_id
            )
        check_request(request, vocab_size=self._facts.vocab_size, max_context_tokens=self.max_context_tokens)
        keys = self._blocks.keys(request)
        return RequestState(request, queued_at=now, keys=keys, eos_token_ids=self._facts.eos_token_ids)

    def _reserved_state(self, request_id: str) -> RequestState:
        state = self._requests.get(request_id)
        if state is None or state.phase is not Phase.RESERVED:
            raise UnknownLease(f"request {request_id} holds no reservation", field="request_id", value=request_id)
        return state

    def _enter(self, state: RequestState) -> None:
        state.arrival = self._arrivals
        self._arrivals += 1
        self._requests[state.request_id] = state

    def _run(self, state: RequestState) -> None:
        if state.phase is Phase.RESERVED:
            self._num_reserved -= 1
        state.phase = Phase.RUNNING
        bisect.insort(self._running, state, key=lambda other: other.arrival)

    def _send_back(self, state: RequestState) -> None:
        """Takes the blocks of a running request; its tokens stay, their KV is recomputed when there is room."""
        self._running.remove(state)
        self._blocks.give_back(state)
        state.phase = Phase.WAITING
        self._waiting.appendleft(state)
        self._preemptions += 1

    def _append(self, state: RequestState, token_id: int) -> tuple[FinishReason | None, str]:
        state.tokens.append(token_id)
        end = state.end_of(token_id, max_context_tokens=self.max_context_tokens)
        if state.request.prefill_only:
            self._running.remove(state)
            state.phase = Phase.HELD
        elif end[0] is not None:
            self._remove(state)
        return end

    def _remove(self, state: RequestState) -> None:
        if state.phase is Phase.RUNNING:
            self._running.remove(state)
        elif state.phase is Phase.WAITING:
            self._waiting.remove(state)
        elif state.phase is Phase.RESERVED:
            self._num_reserved -= 1
        self._blocks.give_back(state)
        del self._requests[state.request_id]

    def _add_chunk(self, state: RequestState, budget: int, now: float) -> int:
        """Puts as much of the request's prompt into the step as the budget lets; returns how much."""
        num_tokens = min(budget, state.num_remaining)
        started = None
        if not state.started:
            state.started = True
            started = RequestStarted(state.request_id, state.num_cached, now - state.queued_at)
        self._add_row(state, num_tokens, started)
        return num_tokens

    def _add_row(self, state: RequestState, num_tokens: int, started: RequestStarted | None) -> None:
        row = state.row(num_tokens, block_size=self._block_size)
        self._in_flight.append(Scheduled(state, row, started))

    def _take_in_flight(self) -> list[Scheduled]:
        in_flight, self._in_flight = self._in_flight, []
        return in_flight

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, cure="try again later", retry_after_s=self._limits.retry_after_s)
