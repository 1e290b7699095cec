"""First tokens of simulated hand-overs wait as at a gateway: nothing but their own time changes."""

from dataclasses import replace

import pytest

from baton.core.costs import StepWork
from baton.core.types import LocalPolicy, Objective
from baton.load.goals import Goal
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.job import PlanJob
from tests.unit.planner.test_cluster import COSTS, NODE, request

NO_SLO = Goal()
PAIR = ClusterSpec(1, 1, NODE, NODE, LocalPolicy.STRICT)
ALONE = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)
# A stream of a minute, and hand-overs that meet its steps at all points.
LOAD = [request(0.0, 100, 10_000), *(request(1.0 + 0.1037 * number, 200, 5) for number in range(200))]


def handed_over(spec: ClusterSpec, goal: Goal = NO_SLO) -> list[PlanJob]:
    """The hand-overs after which the delay is known."""
    return simulate(spec, goal, LOAD).jobs[100:]


def test_only_the_time_of_the_first_token_changes() -> None:
    at_once, waiting = handed_over(replace(PAIR, smooth_starts=False)), handed_over(PAIR)
    for one, other in zip(at_once, waiting, strict=True):
        assert (one.second_s, one.last_s) == (other.second_s, other.last_s)
        assert one.first_s <= other.first_s <= other.second_s


def test_most_first_gaps_are_no_longer_than_the_objective_allows() -> None:
    allowed_s = PAIR.objective.gap_factor * COSTS.seconds(StepWork(2, 2500))
    at_once, waiting = handed_over(replace(PAIR, smooth_starts=False)), handed_over(PAIR)
    assert sum(job.second_s - job.first_s > allowed_s for job in at_once) > 0.9 * len(at_once)
    assert sum(job.second_s - job.first_s > 1.1 * allowed_s for job in waiting) < 0.4 * len(waiting)


def test_first_tokens_still_meet_a_ttft() -> None:
    ttft_s = handed_over(replace(PAIR, smooth_starts=False))[0].ttft_s + 0.003
    jobs = handed_over(PAIR, Goal(ttft_s=ttft_s, tpot_s=0.006))
    assert max(job.ttft_s for job in jobs) <= ttft_s


@pytest.mark.parametrize("spec", [replace(PAIR, objective=Objective(gap_factor=100.0)), ALONE])
def test_nothing_waits_where_the_gap_is_allowed_or_nothing_is_handed_over(spec: ClusterSpec) -> None:
    at_once, waiting = handed_over(replace(spec, smooth_starts=False)), handed_over(spec)
    assert [job.first_s for job in at_once] == [job.first_s for job in waiting]
