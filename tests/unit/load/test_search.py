"""The search for the highest good rate, against servers whose share of good requests is a function of the rate."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.load.search import CONFIRMATIONS, RateSearch

REQUESTS = 500


def search(
    limits: Sequence[float], *, start: float = 1.0, precision: float = 0.05, noise: Callable[[], float] = lambda: 1.0
) -> RateSearch:
    """Each goal is met by all requests up to its limit, and by half of them above it."""
    found = RateSearch.of([0.9] * len(limits), start=start, precision=precision)
    while (rate := found.next_rate()) is not None:
        good = [REQUESTS if rate <= limit * noise() else REQUESTS // 2 for limit in limits]
        found.observe(rate, good, REQUESTS)
    return found


@given(limit=st.floats(0.05, 500.0), start=st.floats(0.5, 20.0))
def test_it_finds_the_limit_within_its_precision(limit: float, start: float) -> None:
    found = search([limit], start=start)
    assert found.next_rate() is None
    assert limit / 1.051 <= found.goals[0].low <= limit
    assert found.runs < 25


def test_each_run_serves_every_goal() -> None:
    limits = [31.0, 44.0, 62.0, 82.0]
    found = search(limits, start=4.0)
    assert [goal.low for goal in found.goals] == [pytest.approx(limit, rel=0.05) for limit in limits]
    alone = sum(search([limit], start=4.0).runs for limit in limits)
    assert found.runs < 0.7 * alone


def test_the_answer_is_confirmed_by_a_second_run() -> None:
    goal = search([10.0]).goals[0]
    runs, good, total = goal.counts[goal.low]
    assert (runs, good, total) == (CONFIRMATIONS, 2 * REQUESTS, 2 * REQUESTS)


def test_a_rate_that_fails_its_confirmation_is_given_up() -> None:
    found = RateSearch.of([0.9], start=1.0, precision=0.5)
    for good in (100, 100, 80):  # 1/s and 2/s are good, 4/s is not
        rate = found.next_rate()
        assert rate is not None
        found.observe(rate, [good], 100)
    lucky = found.next_rate()
    assert lucky is not None
    assert lucky == pytest.approx(2 * 2**0.5)
    found.observe(lucky, [91], 100)
    assert found.next_rate() == lucky  # once more
    found.observe(lucky, [85], 100)
    assert found.goals[0].high == lucky
    assert found.goals[0].low == 2.0
    assert found.goals[0].next_rate() is not None  # 2/s needs its own confirmation


def test_a_noisy_server_does_not_keep_it_busy_for_ever() -> None:
    rng = random.Random(3)
    found = search([20.0, 30.0], noise=lambda: rng.uniform(0.8, 1.2))
    assert found.next_rate() is None
    assert found.runs < 40
    assert 14.0 < found.goals[0].low < 25.0


def test_a_goal_that_no_rate_meets_ends_with_zero() -> None:
    found = search([0.0])
    assert found.next_rate() is None
    assert found.goals[0].low == 0.0


def test_a_server_without_limit_is_left_at_the_highest_rate() -> None:
    found = RateSearch.of([0.9], start=1.0, precision=0.05, rate_max=100.0)
    while (rate := found.next_rate()) is not None:
        assert rate <= 100.0
        found.observe(rate, [10], 10)
    assert found.goals[0].low == 100.0
    assert found.goals[0].high == float("inf")


def test_it_stops_at_the_number_of_runs_allowed() -> None:
    found = RateSearch.of([0.9], start=1.0, precision=0.001, runs_max=3)
    while (rate := found.next_rate()) is not None:
        found.observe(rate, [10 if rate < 7 else 0], 10)
    assert found.runs == 3
    assert found.goals[0].next_rate() is not None
