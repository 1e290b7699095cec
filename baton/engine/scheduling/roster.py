"""All live requests of one engine by phase: waiting, ready, running, reserved, held. Pure."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from baton.engine.request import IntArray, QueuePlace
from baton.engine.scheduling.slices import StreamBound
from baton.engine.scheduling.state import RequestPhase, RequestState

_place_of = attrgetter("place")


def _bound_of(state: RequestState) -> StreamBound:
    return StreamBound(state.request.tpot_s, state.request.gap_factor)


class Roster:
    """Sorts the requests into lists by phase. A request has a seat while it runs.

    Args:
        may_run: whether a ready request may have a seat now. Until then it delays no other request.
        num_pools: pools of blocks, as in `ModelFacts.num_owners`.

    Attributes:
        seats: most running requests.
        waiting: waiting requests, sorted by place.
        ready: requests that have their blocks and wait for a seat, sorted by place.
        running: running requests, sorted by place.
        streams: the bounds of running requests that decode here, with the number of requests of each.
        arrivals: number of all requests so far.
        num_reserved: requests whose KV is on its way; no more than there are seats.
    """

    def __init__(self, *, seats: int, may_run: Callable[[RequestState], bool], num_pools: int = 1) -> None:
        self._may_run = may_run
        self._num_pools = num_pools
        self.waiting: list[RequestState] = []
        self.ready: list[RequestState] = []
        self.running: list[RequestState] = []
        self.streams: Counter[StreamBound] = Counter()
        self.arrivals = 0
        self.num_reserved = 0
        self.seats = seats
        self._by_id: dict[str, RequestState] = {}

    @property
    def free_seats(self) -> int:
        return max(0, self.seats - len(self.running))

    @property
    def may_reserve(self) -> bool:
        """Whether one more request may be reserved: it should find a seat soon after its KV arrives."""
        return not any(map(self._may_run, self.ready)) and self.num_reserved < self.seats

    def decoders(self) -> Counter[int]:
        """Number of requests by pool that decode now or later and have a seat or wait for one. A newcomer leaves each
        of them a free block."""
        if self._num_pools == 1:
            return Counter({0: self.streams.total() + len(self.ready)})
        pools = [state.pool for state in self.running if not state.prefill_only]
        return Counter(pools + [state.pool for state in self.ready])

    @property
    def num_streams(self) -> int:
        """Number of requests that decode here, now or later."""
        return sum(1 for state in self._by_id.values() if not state.prefill_only)

    @property
    def num_stream_blocks(self) -> int:
        """Number of distinct blocks of requests that decode here, now or later."""
        return self._num_blocks(lambda state: not state.prefill_only)

    def last_decoder(self, pool: int) -> RequestState:
        """The running request of the pool that is preempted first: the one at the last place."""
        return next(state for state in reversed(self.running) if state.pool == pool and not state.prefill_only)

    @property
    def num_leased(self) -> int:
        """Number of distinct blocks of requests whose KV is being received or sent."""
        return self._num_blocks(lambda state: state.phase in (RequestPhase.RESERVED, RequestPhase.HELD))

    def _num_blocks(self, counts: Callable[[RequestState], bool]) -> int:
        """Number of distinct blocks of the requests that count."""
        blocks: defaultdict[int, list[IntArray]] = defaultdict(list)
        for state in self._by_id.values():
            if counts(state):
                blocks[state.pool].append(state.blocks)
        return sum(int(np.count_nonzero(np.bincount(np.concatenate(each)))) for each in blocks.values())

    def decoding(self) -> list[RequestState]:
        """The running requests whose prompts are computed, except `prefill_only` ones."""
        return [state for state in self.running if not state.prefill_only and not state.prompt_remaining]

    def in_prompt(self) -> list[RequestState]:
        """The requests whose prompts are not computed yet."""
        parts = (self.waiting, self.ready, self.running)
        return [state for states in parts for state in states if state.prompt_remaining]

    def find(self, request_id: str) -> RequestState | None:
        return self._by_id.get(request_id)

    def everyone(self) -> list[RequestState]:
        return list(self._by_id.values())

    def waiting_before(self, place: QueuePlace) -> list[RequestState]:
        return self.waiting[: bisect_left(self.waiting, place, key=_place_of)]

    def enter(self, state: RequestState, phase: RequestPhase) -> None:
        """Adds a new request, waiting or reserved."""
        self.arrivals += 1
        self._by_id[state.request_id] = state
        self._join(state, phase)

    def run(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, RequestPhase.RUNNING)

    def make_ready(self, state: RequestState) -> None:
        """Lets the request, which has its blocks, take the next free seat."""
        self._leave(state)
        self._join(state, RequestPhase.READY)

    def fill_seats(self, *, kept: int = 0) -> None:
        """Gives the free seats, all but `kept`, to the first ready requests that may run."""
        able = [state for state in self.ready if self._may_run(state)]
        for state in able[: max(0, self.free_seats - kept)]:
            self.run(state)

    def move(self, state: RequestState, place: QueuePlace) -> None:
        """Changes the request's place."""
        if place == state.place:
            return
        phase = state.phase
        self._leave(state)
        state.place = place
        self._join(state, phase)

    def hold(self, state: RequestState) -> None:
        self._leave(state)
        self._join(state, RequestPhase.HELD)

    def wait(self, state: RequestState) -> None:
        """Makes a preempted request wait at its place."""
        self._leave(state)
        self._join(state, RequestPhase.WAITING)

    def end(self, state: RequestState) -> None:
        """Removes the request; its id is free again."""
        self._leave(state)
        state.phase = RequestPhase.ENDED
        del self._by_id[state.request_id]

    def _join(self, state: RequestState, phase: RequestPhase) -> None:
        state.phase = phase
        if phase is RequestPhase.RUNNING:
            insort(self.running, state, key=_place_of)
            if not state.prefill_only:
                self.streams[_bound_of(state)] += 1
        elif phase is RequestPhase.WAITING:
            insort(self.waiting, state, key=_place_of)
        elif phase is RequestPhase.READY:
            insort(self.ready, state, key=_place_of)
        elif phase is RequestPhase.RESERVED:
            self.num_reserved += 1

    def _leave(self, state: RequestState) -> None:
        if state.phase is RequestPhase.RUNNING:
            self.running.remove(state)
            if not state.prefill_only:
                bound = _bound_of(state)
                self.streams[bound] -= 1
                if not self.streams[bound]:
                    del self.streams[bound]
        elif state.phase is RequestPhase.WAITING:
            self.waiting.remove(state)
        elif state.phase is RequestPhase.READY:
            self.ready.remove(state)
        elif state.phase is RequestPhase.RESERVED:
            self.num_reserved -= 1
