"""What first tokens take beyond queues and steps is learned from requests, for each route alone."""

import random
from collections import deque

import pytest

from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import place
from baton.gateway.fleet.route_overheads import NO_OVERHEADS, LearnedOverheads, RouteOverheads
from baton.gateway.fleet.router import RoutedRequest
from tests.unit.gateway.test_placement import DECODE, PREFILL


def learn(
    learned: LearnedOverheads,
    overhead_s: float,
    *,
    remote: bool,
    count: int,
    step_s: float = 0.01,
    in_flight: int = 0,
    since_s: float = 0.0,
) -> float:
    """`count` requests whose first token comes `overhead_s` after a step, give or take a fifth of that, and which are
    recorded once so many others have come. Returns the largest overhead on the way."""
    draw = random.Random(0)
    waiting: deque[float] = deque()
    most_s = 0.0
    for number in range(count):
        waiting.append(step_s + overhead_s * draw.uniform(0.8, 1.2))
        if len(waiting) > in_flight:
            now_s = since_s + 0.01 * number
            learned.add(remote=remote, predicted_s=step_s, ttft_s=waiting.popleft(), now_s=now_s)
            most_s = max(most_s, *learned.at(now_s))
    return most_s


def test_each_route_has_an_overhead_of_its_own() -> None:
    learned = LearnedOverheads()
    assert learned.at(0.0) == NO_OVERHEADS
    learn(learned, 0.008, remote=True, count=100)
    learn(learned, 0.004, remote=False, count=100)
    assert learned.at(1.0).remote_s == pytest.approx(0.008, rel=0.2)
    assert learned.at(1.0).local_s == pytest.approx(0.004, rel=0.2)


def test_an_overhead_that_has_gone_is_forgotten() -> None:
    learned = LearnedOverheads()
    learn(learned, 0.05, remote=True, count=300)
    assert learned.at(3.0).remote_s == pytest.approx(0.05, rel=0.2)
    learn(learned, 0.0, remote=True, count=300, since_s=3.0)
    assert learned.at(6.0).remote_s < 0.001


@pytest.mark.parametrize("in_flight", [20, 100, 400])
def test_answers_that_end_much_later_do_not_drive_it_away(in_flight: int) -> None:
    learned = LearnedOverheads()
    assert learn(learned, 0.008, remote=True, count=4000, in_flight=in_flight) < 0.011
    assert learned.at(40.0).remote_s == pytest.approx(0.008, rel=0.25)


def test_what_made_a_route_slow_is_forgotten_while_nobody_takes_it() -> None:
    learned = LearnedOverheads()
    learn(learned, 2.0, remote=False, count=200)
    slow_s = learned.at(2.0).local_s
    assert slow_s == pytest.approx(0.1, rel=0.1), "what takes longer is not overhead"
    assert learned.at(62.0).local_s == pytest.approx(slow_s / 2, rel=0.1)
    assert learned.at(602.0).local_s < 0.001


def test_long_prompts_teach_nothing() -> None:
    learned = LearnedOverheads()
    learn(learned, 0.05, remote=True, count=100, step_s=0.2)
    assert learned.at(1.0) == NO_OVERHEADS


@pytest.mark.parametrize("policy", [LocalPolicy.LOCAL, LocalPolicy.STRICT])
def test_predictions_contain_the_overhead_of_their_route(policy: LocalPolicy) -> None:
    plain = place([DECODE], [PREFILL], RoutedRequest(1000, policy))
    later = place([DECODE], [PREFILL], RoutedRequest(1000, policy, overheads=RouteOverheads(0.3, 0.1)))
    assert plain is not None
    assert later is not None
    assert plain.predicted_ttft_s is not None
    added_s = 0.1 if policy is LocalPolicy.LOCAL else 0.3
    assert later.predicted_ttft_s == pytest.approx(plain.predicted_ttft_s + added_s)
