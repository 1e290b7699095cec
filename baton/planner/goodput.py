"""Finds the highest rate at which a simulated cluster meets a goal, by bisection. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from baton.gateway.fleet.placement import place
from baton.load.goals import Goal
from baton.load.workload import LengthSpan, Workload
from baton.planner.cluster import Choose, ClusterSpec, simulate
from baton.planner.outcome import SimulatedOutcome

_WARMUP_S = 5.0
_MOST_REQUESTS = 6000
_MOST_RATE = 60_000.0  # above it a run is over before requests could wait
_SEED = 1


@dataclass(frozen=True)
class Measure:
    """The length of one simulated run.

    Args:
        requests, seconds: least number of counted requests, and least time in which they arrive.
        precision: relative width of the interval at which a search ends.
    """

    requests: int = 1000
    seconds: float = 30.0
    precision: float = 0.03

    def run(
        self, spec: ClusterSpec, workload: Workload, goal: Goal, rate: float, *, choose: Choose = place
    ) -> SimulatedOutcome:
        requests = min(max(self.requests, round(self.seconds * rate)), max(self.requests, _MOST_REQUESTS))
        # Small models take so many requests per second that seconds of them would take minutes to simulate.
        warmup_s = max(min(_WARMUP_S, _MOST_REQUESTS / rate), 0.1 * requests / rate)
        planned = workload.plan(rate, LengthSpan(requests=requests, warmup_s=warmup_s), _SEED)
        return simulate(spec, goal, planned, choose=choose, until_failed=True)


@dataclass(frozen=True)
class Goodput:
    """The highest rate that meets the goal: 0 if none does, and about 60,000 per second at most, where searches end.
    `outcome` is that of a run at this rate, or at the lowest rate tried."""

    rate: float
    outcome: SimulatedOutcome
    limit: SimulatedOutcome  # of the run at the lowest rate that failed, or of the last run where none failed


def find_goodput(
    spec: ClusterSpec,
    workload: Workload,
    goal: Goal,
    *,
    start: float,
    measure: Measure = Measure(),
    choose: Choose = place,
    on_run: Callable[[], None] = lambda: None,
) -> Goodput:
    """Finds the highest rate at which a simulated cluster meets the goal.

    Args:
        start: the rate that is tried first, in requests per second.
        on_run: called before each run.
    """

    def run(rate: float) -> tuple[bool, SimulatedOutcome]:
        on_run()
        outcome = measure.run(spec, workload, goal, rate, choose=choose)
        return outcome.share(goal) >= goal.share, outcome

    low, high, rate = 0.0, 0.0, start
    good: SimulatedOutcome | None = None
    bad: SimulatedOutcome | None = None
    lowest = start / 1000
    while bad is None or (good is None and rate > lowest) or high - low > measure.precision * high:
        met, outcome = run(rate)
        if met:
            low, good = rate, outcome
            if rate >= _MOST_RATE:
                return Goodput(rate, outcome, outcome)
        else:
            high, bad = rate, outcome
        if bad is None:
            rate = 1.5 * rate
        elif good is None:
            rate = high / 2
            if rate < lowest:
                return Goodput(0.0, bad, bad)
        else:
            rate = (low + high) / 2
    assert good is not None
    return Goodput(low, good, bad)
