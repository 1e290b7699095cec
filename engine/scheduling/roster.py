"""All live requests of one engine by phase: waiting, running, reserved, held. Pure."""

import math
from bisect import bisect_left, insort
from operator import attrgetter

from engine.request import QueuePlace
from engine.scheduling.state import Phase, RequestState

_place_of = attrgetter("place")


class Roster:
    """A request has a seat while it runs or is reserved.

    Attributes:
        waiting: waiting requests, sorted by place.
        running: running requests, sorted by place.
        arrivals: number of all requests so far.
    """

    def __init__(self, *, seats: int) -> None:
        self.waiting: list[RequestState] = []
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
    def last_decoder(self) -> RequestState:
        """The first to give way: the latest of those with the worst priority."""
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

    def next_place(self, priority: int, due_s: float | None) -> QueuePlace:
        """The place of a request that arrives now."""
        return QueuePlace(priority, math.inf if due_s is None else due_s, self.arrivals)

    def waiting_before(self, place: QueuePlace) -> list[RequestState]:
        return self.waiting[: bisect_left(self.waiting, place, key=_place_of)]

    def enter(self, state: RequestState, phase: Phase) -> None:
        """Adds a new request, which waits or is reserved."""
        self.arrivals += 1
        self._by_id[state.request_id] = state
        self._join(state, phase)

    def run(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, Phase.RUNNING)

    def hold(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, Phase.HELD)

    def wait(self, state: RequestState) -> None:
        """A preempted request waits at its place, before all later requests of its priority."""
        self._leave(state)
        self._join(state, Phase.WAITING)

    def end(self, state: RequestState) -> None:
        """Removes the request; its id is free again."""
        self._leave(state)
        state.phase = Phase.ENDED
        del self._by_id[state.request_id]

    def _join(self, state: RequestState, phase: Phase) -> None:
        state.phase = phase
        if phase is Phase.RUNNING:
            insort(self.running, state, key=_place_of)
        elif phase is Phase.WAITING:
            insort(self.waiting, state, key=_place_of)
        elif phase is Phase.RESERVED:
            self._num_reserved += 1

    def _leave(self, state: RequestState) -> None:
        if state.phase is Phase.RUNNING:
            self.running.remove(state)
        elif state.phase is Phase.WAITING:
            self.waiting.remove(state)
        elif state.phase is Phase.RESERVED:
            self._num_reserved -= 1
