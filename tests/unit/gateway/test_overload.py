"""Goodput, refusals and fairness of a whole cluster under overload, in virtual time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.core.costs import StepCosts
from tests.unit.gateway.overload_model import Client, Nodes, Result, World

COSTS = StepCosts(((1, 0.010), (64, 0.030), (256, 0.080)))
CAPACITY = 66.0  # requests a second
DURATION_S = 12.0


def nodes() -> Nodes:
    return Nodes(COSTS, prompt_s=0.005, seats=64)


def served(load: float, *, admits: bool = True, gateways: int = 1, deadline_s: float | None = 6.0) -> Result:
    world = World(nodes(), admits=admits, gateways=gateways)
    return world.run([Client("a", rate=load * CAPACITY, deadline_s=deadline_s)], DURATION_S)["a"]


@pytest.fixture(scope="module")
def peak() -> float:
    return len(served(1.0).good) / DURATION_S


def test_without_admission_an_overload_fails_nearly_all(peak: float) -> None:
    assert len(served(3.0, admits=False).good) / DURATION_S < 0.75 * peak


@pytest.mark.parametrize(("load", "gateways"), [(1.5, 1), (3.0, 2), (10.0, 1)])
def test_goodput_stays_at_its_peak_and_refusals_come_at_once(peak: float, load: float, gateways: int) -> None:
    result = served(load, gateways=gateways)
    assert len(result.good) / DURATION_S >= 0.95 * peak
    assert result.late <= 0.01 * len(result.good)
    at_once = [seconds for seconds in result.refused if seconds < 0.05]
    assert len(at_once) >= 0.99 * len(result.refused)
    assert min(result.hints) >= 0.1
    assert max(result.hints) <= 60.0


def test_without_deadlines_the_queue_is_bounded(peak: float) -> None:
    world = World(nodes(), queue_s=3.0)
    result = world.run([Client("a", rate=2 * CAPACITY, deadline_s=None)], 2 * DURATION_S)["a"]
    assert len(result.good) / (2 * DURATION_S) >= 0.95 * peak
    assert max(result.good) <= 3.0 + 2.0
    assert max(result.good[-200:]) <= 0.5 * 3.0 + 2.0, "a queue that stands is cut to its target"


# Steps of the demo model on one core; and what a node believed after it had served few steps.
DEMO = StepCosts(((1, 0.0065), (64, 0.031), (128, 0.056)))
BELIEVED = StepCosts(((1, 0.0055), (7, 0.0161), (67, 0.0161), (134, 0.0202)))


def demo_nodes() -> Nodes:
    return Nodes(DEMO, reported=BELIEVED, prompt_s=0.010, seats=64, mixed=True)


@pytest.mark.parametrize("make_nodes", [nodes, demo_nodes], ids=["two roles", "one node, wrong costs"])
def test_a_light_user_next_to_a_heavy_one_is_served_as_if_nearly_alone(make_nodes: Callable[[], Nodes]) -> None:
    light = Client("light", rate=2.0, deadline_s=None, output_tokens=64)
    heavy = Client("heavy", at_once=150, deadline_s=None, output_tokens=64, after_s=3.0)
    alone = World(make_nodes()).run([light], DURATION_S)["light"]
    most = World(make_nodes()).run([replace(heavy, after_s=0.0)], DURATION_S)["heavy"]
    both = World(make_nodes()).run([light, heavy], DURATION_S)
    beside = both["light"]
    assert not beside.refused
    assert len(beside.good) >= 15
    assert max(beside.good) <= 2.3 * max(alone.good)
    assert len(both["heavy"].good) / (DURATION_S - 3.0) >= 0.5 * len(most.good) / DURATION_S


def test_a_light_user_whom_nobody_expected_is_served_well_from_its_second_request_on() -> None:
    light = Client("light", rate=2.0, deadline_s=None, output_tokens=64, after_s=3.0)
    heavy = Client("heavy", at_once=150, deadline_s=None, output_tokens=64)
    alone = World(demo_nodes()).run([light], DURATION_S)["light"]
    beside = World(demo_nodes()).run([light, heavy], DURATION_S)["light"]
    assert not beside.refused
    assert max(beside.good[6:]) <= 2.3 * max(alone.good)


def test_clients_get_equal_shares_however_much_they_send() -> None:
    clients = [Client("a", rate=30.0), Client("b", rate=60.0), Client("c", rate=240.0)]
    results = World(nodes()).run(clients, DURATION_S)
    shares = [len(results[name].good) for name in "abc"]
    assert sum(shares) / DURATION_S >= 0.85 * CAPACITY
    assert min(shares) >= 0.7 * max(shares)
