"""What first tokens take beyond queues and steps is learned from requests, for each route alone."""

import random

import pytest

from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import place
from baton.gateway.fleet.route_overheads import NO_OVERHEADS, LearnedOverheads, RouteOverheads
from baton.gateway.fleet.router import RoutedRequest
from tests.unit.gateway.test_placement import DECODE, PREFILL


def learn(learned: LearnedOverheads, overhead_s: float, *, remote: bool, count: int, step_s: float = 0.01) -> None:
    """`count` requests whose first token comes `overhead_s` after a step, give or take a fifth of that."""
    draw = random.Random(0)
    for _ in range(count):
        known_s = learned.present.remote_s if remote else learned.present.local_s
        ttft_s = step_s + overhead_s * draw.uniform(0.8, 1.2)
        learned.add(remote=remote, predicted_s=step_s + known_s, ttft_s=ttft_s)


def test_each_route_has_an_overhead_of_its_own() -> None:
    learned = LearnedOverheads()
    assert learned.present == NO_OVERHEADS
    learn(learned, 0.008, remote=True, count=100)
    learn(learned, 0.004, remote=False, count=100)
    assert learned.present.remote_s == pytest.approx(0.008, rel=0.2)
    assert learned.present.local_s == pytest.approx(0.004, rel=0.2)


def test_an_overhead_that_has_gone_is_forgotten() -> None:
    learned = LearnedOverheads()
    learn(learned, 0.05, remote=True, count=300)
    assert learned.present.remote_s == pytest.approx(0.05, rel=0.2)
    learn(learned, 0.0, remote=True, count=300)
    assert learned.present.remote_s < 0.001


def test_long_prompts_teach_nothing() -> None:
    learned = LearnedOverheads()
    learn(learned, 0.05, remote=True, count=100, step_s=0.2)
    assert learned.present == NO_OVERHEADS


@pytest.mark.parametrize("policy", [LocalPolicy.LOCAL, LocalPolicy.STRICT])
def test_predictions_contain_the_overhead_of_their_route(policy: LocalPolicy) -> None:
    plain = place([DECODE], [PREFILL], RoutedRequest(1000, policy))
    later = place([DECODE], [PREFILL], RoutedRequest(1000, policy, overheads=RouteOverheads(0.3, 0.1)))
    assert plain is not None
    assert later is not None
    assert plain.predicted_ttft_s is not None
    added_s = 0.1 if policy is LocalPolicy.LOCAL else 0.3
    assert later.predicted_ttft_s == pytest.approx(plain.predicted_ttft_s + added_s)
