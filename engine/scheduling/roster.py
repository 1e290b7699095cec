"""All live requests of one engine by phase: waiting in order, running, reserved, held. Pure."""

import bisect
from collections import deque

from engine.scheduling.state import Phase, RequestState


class Roster:
    """A request has a seat while it runs or is reserved.

    Attributes:
        waiting: waiting requests in the order in which they may run.
        running: running requests in order of arrival.
        arrivals: number of all requests so far.
    """

    def __init__(self, *, seats: int) -> None:
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.arrivals = 0
        self._seats = seats
        self._num_reserved = 0
        self._by_id: dict[str, RequestState] = {}

    @property
    def free_seats(self) -> int:
        return self._seats - len(self.running) - self._num_reserved

    @property
    def num_decoders(self) -> int:
        """Running requests that decode now or later. A newcomer leaves each of them a free block."""
        return sum(1 for state in self.running if not state.prefill_only)

    @property
    def latest_decoder(self) -> RequestState:
        return next(state for state in reversed(self.running) if not state.prefill_only)

    @property
    def num_leased(self) -> int:
        """Distinct blocks of requests whose KV is being received or sent."""
        leased: set[int] = set()
        for state in self._by_id.values():
            if state.phase in (Phase.RESERVED, Phase.HELD):
                leased.update(state.blocks)
        return len(leased)

    @property
    def tokens_waiting(self) -> int:
        """Prompt tokens that are not computed yet."""
        return sum(state.prompt_remaining for states in (self.waiting, self.running) for state in states)

    def find(self, request_id: str) -> RequestState | None:
        return self._by_id.get(request_id)

    def everyone(self) -> list[RequestState]:
        return list(self._by_id.values())

    def enter(self, state: RequestState, phase: Phase) -> None:
        """Adds a new request, which waits after all others or is reserved."""
        state.arrival = self.arrivals
        self.arrivals += 1
        self._by_id[state.request_id] = state
        self._join(state, phase)

    def run(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, Phase.RUNNING)

    def hold(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, Phase.HELD)

    def wait_first(self, state: RequestState) -> None:
        """A preempted request is the next to run."""
        self._leave(state)
        state.phase = Phase.WAITING
        self.waiting.appendleft(state)

    def end(self, state: RequestState) -> None:
        """Removes the request; its id is free again."""
        self._leave(state)
        state.phase = Phase.ENDED
        del self._by_id[state.request_id]

    def _join(self, state: RequestState, phase: Phase) -> None:
        state.phase = phase
        if phase is Phase.RUNNING:
            bisect.insort(self.running, state, key=lambda other: other.arrival)
        elif phase is Phase.WAITING:
            self.waiting.append(state)
        elif phase is Phase.RESERVED:
            self._num_reserved += 1

    def _leave(self, state: RequestState) -> None:
        if state.phase is Phase.RUNNING:
            self.running.remove(state)
        elif state.phase is Phase.WAITING:
            self.waiting.remove(state)
        elif state.phase is Phase.RESERVED:
            self._num_reserved -= 1
