"""Chooses which prompts a step computes, and how much of each: earliest deadline first, within the step's bound. Pure.

Requests are computed in the order of priority, then of the time when their first token is due. That order is best as
long as every deadline can be met. Under overload it fails all of them, so a request that will be late even if it is
computed next goes after the others: it counts as due `DEFAULT_TTFT_S` later than it was. A request without a deadline
counts as due `DEFAULT_TTFT_S` after its client began to wait. Each of these is therefore first in its priority after a
bounded time.

Requests whose client has tokens go before all others of their priority, in order of arrival (`QueuePlace.begun`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.core.errors import Overloaded
from baton.core.types import first_token_due_s
from baton.engine.events import RequestFailed
from baton.engine.request import EngineLimits, QueuePlace
from baton.engine.scheduling.costs import Costs
from baton.engine.scheduling.rank_shares import PromptClass, RankShares
from baton.engine.scheduling.request_blocks import RequestBlocks
from baton.engine.scheduling.roster import Roster
from baton.engine.scheduling.slices import DEFAULT_TTFT_S, SlicePace, Slicer
from baton.engine.scheduling.state import RequestPhase, RequestState
from baton.engine.scheduling.steps import NextStep

# Hint to clients whose request is refused for lack of room or time.
RETRY_AFTER_S = 1.0
_place_of = attrgetter("place")


def _class_of(state: RequestState) -> PromptClass:
    """What goes before deadlines in the order of places: priority, and whether the client has tokens."""
    return state.place.priority, not state.place.begun


def place_of_late(state: RequestState) -> QueuePlace:
    """The place of a request that cannot meet its deadline."""
    return state.place._replace(due_s=state.place.due_s + DEFAULT_TTFT_S)


def is_late(state: RequestState, pace: SlicePace | None, *, start: int, now: float) -> bool:
    """Whether the first token will be late even if the prompt is computed before all others.

    Args:
        pace: speed of prompts next to the current decodes; None: unknown, so only a deadline that has passed counts.
        start: tokens before this one need not be computed.
    """
    if state.due_s is None:
        return False
    computing_s = 0.0 if pace is None else pace.seconds(start, state.prefill_stop)
    return now + computing_s > state.due_s


def backlog_s(costs: StepCosts, prompts: Sequence[RequestState], *, step_tokens: int) -> float:
    """The time to compute the rest of all these prompts in full steps, if nothing else ran."""
    tokens = sum(state.prompt_remaining for state in prompts)
    pairs = sum(chunk_pairs(state.num_computed, state.prefill_stop) for state in prompts)
    return costs.prompt_s(0, tokens, step_tokens=step_tokens) + costs.pair_s * (pairs - chunk_pairs(0, tokens))


class Prompts:
    """The prompts of one engine, of waiting and of running requests.

    Args:
        stop: stops the computation of a running request.

    Attributes:
        num_refused: how many requests were refused for being late.
    """

    def __init__(
        self,
        roster: Roster,
        blocks: RequestBlocks,
        limits: EngineLimits,
        meter: Costs,
        *,
        stop: Callable[[RequestState], None],
    ) -> None:
        self.num_refused = 0
        self._stop = stop
        self._roster = roster
        self._blocks = blocks
        self._limits = limits
        self._meter = meter
        self._slicer = Slicer()
        self._refused: list[RequestFailed] = []

    def set_limits(self, limits: EngineLimits) -> None:
        self._limits = limits

    @property
    def backlog_s(self) -> float:
        """The predicted time for all prompts that are not computed yet; 0 while costs are unknown."""
        costs = self._meter.costs
        prompts = self._roster.in_prompt()
        if costs is None or not prompts:
            return 0.0
        return backlog_s(costs, prompts, step_tokens=self._limits.max_batch_tokens)

    def check_in_time(self, state: RequestState, now: float) -> None:
        """Refuses a new request that cannot meet its deadline, if it has `refuse_late`.

        Raises:
            Overloaded: the request would be late, and has `refuse_late`.
        """
        if not state.request.refuse_late:
            return
        decoding = self._roster.decoding()
        decodes = StepWork(len(decoding), sum(each.num_tokens for each in decoding))
        if is_late(state, self._pace(decodes), start=self._blocks.search.num_cached(state), now=now):
            self.num_refused += 1
            raise self._too_late()

    def add_to(self, step: NextStep, running: list[RequestState], now: float, *, admit: bool) -> None:
        """Adds chunks of prompts in the order of their requests' places, and lets waiting requests run.

        Args:
            running: the running requests with prompt tokens that no step has yet.
            admit: whether waiting requests may start.
        """
        roster = self._roster
        if not running and not (admit and roster.waiting and roster.free_seats):
            return
        pace = self._pace(step.plain)
        for state in [state for state in running if is_late(state, pace, start=state.num_scheduled, now=now)]:
            self._fall_back(state)
        prompts = sorted([state for state in running if state.phase is RequestPhase.RUNNING], key=_place_of)
        overdue = self._overdue(prompts, now, admit=admit)
        step.bound = self._slicer.bound(
            self._meter.costs, step.plain, roster.streams, overdue=overdue, drafted=step.work, wait_s=step.wait_s
        )
        if self._blocks.num_pools == 1:
            self._add_round(step, prompts, pace, now, admit=admit)
        else:
            self._add_level(step, prompts, pace, now, admit=admit)
        step.add_planned()
        self._slicer.launched(skipped=step.has_skipped)

    def _add_level(
        self, step: NextStep, prompts: list[RequestState], pace: SlicePace | None, now: float, *, admit: bool
    ) -> None:
        """Plans chunks in rounds in which ranks get up to equally many tokens: of the best class of prompts while they
        take any, then of the next class."""
        shares, done = RankShares(self._blocks.num_pools), set[PromptClass]()
        for row in step.rows:
            shares.add(row.owner, len(row.token_ids))
        while step.budget > 0:
            waiting = self._next_waiting(admit=admit)
            candidates = prompts if waiting is None else [*prompts, waiting]
            classes = {_class_of(state) for state in candidates} - done
            if not classes:
                break
            shares.served, before = min(classes), step.budget
            served = [state for state in candidates if _class_of(state) == shares.served]
            room = step.budget if step.bound is None else step.bound.tokens(step.work, 0, step.budget)
            # The end of a prompt may fit where nothing else does.
            ranks = {state.pool for state in served if state is not waiting}
            shares.begin_round(room or step.budget, ranks, waiting=waiting in served)
            prompts, admit = self._add_round(step, prompts, pace, now, admit=admit, shares=shares)
            if step.budget == before and not shares.is_held_back:
                done.add(shares.served)

    def _next_waiting(self, *, admit: bool) -> RequestState | None:
        roster = self._roster
        return roster.waiting[0] if admit and roster.waiting and roster.free_seats else None

    def _add_round(
        self,
        step: NextStep,
        prompts: list[RequestState],
        pace: SlicePace | None,
        now: float,
        *,
        admit: bool,
        shares: RankShares | None = None,
    ) -> tuple[list[RequestState], bool]:
        """Plans chunks of prompts in the order of their requests' places, and lets waiting requests run. Returns the
        prompts that a further round may add to, in order, and whether it may let waiting requests run.

        Args:
            shares: the tokens that each rank may get; None: there is one rank.
        """
        queue, begun = deque(prompts), list[RequestState]()
        while step.budget > 0:
            waiting = self._next_waiting(admit=admit)
            if waiting is not None and (not queue or waiting.place < queue[0].place):
                admit = self._try_to_run(waiting, step, pace, now, others=len(queue), shares=shares)
                begun += [waiting] if waiting.phase is RequestPhase.RUNNING else []
            elif queue:
                state = queue.popleft()
                begun.append(state)
                self._plan(step, state, shares, others=len(queue))
            else:
                break
        left = [state for state in (*begun, *queue) if step.left_of(state)]
        return left, admit or (shares is not None and shares.deferred)

    def _plan(self, step: NextStep, state: RequestState, shares: RankShares | None, *, others: int) -> None:
        """Plans a chunk of a running request, if its class is served and its rank has room."""
        if shares is None:
            step.plan_chunk(state, others=others)
        elif _class_of(state) == shares.served and (most := shares.room(state.pool)):
            shares.add(state.pool, step.plan_chunk(state, others=others, most=most))

    def take_refused(self) -> tuple[RequestFailed, ...]:
        """The requests that were refused since the last call, because they cannot meet their deadline."""
        refused, self._refused = tuple(self._refused), []
        return refused

    def _overdue(self, running: Iterable[RequestState], now: float, *, admit: bool) -> float:
        """Wait of the first unstarted prompt's client, in multiples of the time in which its first token should come.
        Prompts also wait in gateways, which send nodes no more than these compute soon.

        A prompt in progress does not wait.
        """
        roster, costs = self._roster, self._meter.costs
        untouched = [state for state in running if not state.started]
        if admit and roster.free_seats:
            untouched += roster.waiting[:1]
        if not untouched or costs is None:
            return 0.0
        first = min(untouched, key=_place_of)
        alone_s = costs.prompt_s(first.num_computed, first.prefill_stop, step_tokens=self._limits.max_batch_tokens)
        before_s = 0.0 if first.place.begun else first.waited_s
        return (now - first.queued_at + before_s) / first_token_due_s(alone_s, first.request.ttft_factor)

    def _try_to_run(
        self,
        state: RequestState,
        step: NextStep,
        pace: SlicePace | None,
        now: float,
        *,
        others: int,
        shares: RankShares | None,
    ) -> bool:
        """Lets the first waiting request run if its blocks and its chunk fit. Returns False if it waits; then all
        others wait too.

        Args:
            others: running requests that must find a row in the step.
            shares: the tokens that each rank may get; None: there is one rank.
        """
        if shares is not None and _class_of(state) != shares.served:
            shares.deferred = True
            return False
        place = self._blocks.place(state, self._blocks.room(self._roster.decoders()))
        start = self._blocks.search.num_cached(state) if place is None else self._blocks.search.num_tokens(place.cached)
        if is_late(state, pace, start=start, now=now):
            self._fall_back(state)
            return True  # with the next one
        if place is None:
            return False
        most = None
        if shares is not None and not (most := shares.room(place.pool)):
            shares.defer(place.pool)
            return False
        if not step.chunk_tokens(state, start, others=others, most=most):
            return False
        self._blocks.take(state, place)
        self._roster.run(state)
        self._plan(step, state, shares, others=others)
        return True

    def _pace(self, decodes: StepWork) -> SlicePace | None:
        costs = self._meter.costs
        if costs is None:
            return None
        return self._slicer.pace(costs, decodes, self._roster.streams, step_tokens=self._limits.max_batch_tokens)

    def _fall_back(self, state: RequestState) -> None:
        """Moves a request that cannot meet its deadline after those that can, or refuses it."""
        state.due_s = None
        if not state.request.refuse_late:
            self._roster.move(state, place_of_late(state))
            return
        if state.phase is RequestPhase.WAITING:
            self._roster.end(state)
        else:
            self._stop(state)
        self.num_refused += 1
        self._refused.append(RequestFailed(state.request_id, self._too_late()))

    def _too_late(self) -> Overloaded:
        return Overloaded(
            "the first token cannot meet its deadline",
            cure="set a later deadline, send a shorter prompt, or retry when fewer prompts wait",
            retry_after_s=max(RETRY_AFTER_S, self.backlog_s),
        )
