"""Draft tokens of simulated nodes: what they bring, what they cost, and where they come from."""

from dataclasses import replace
from typing import Any

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.core.decode_pace import PLAIN_PACE
from baton.core.errors import InvalidRequest
from baton.core.types import LocalPolicy
from baton.engine.speculation.limits import assumed_wait_s
from baton.gateway.fleet.node_view import NodeView
from baton.load.goals import Goal
from baton.load.lengths import Fixed
from baton.load.workload import LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, Simulation
from baton.planner.drafts import NO_DRAFTS, MeanDrafts, measured_drafts, parse_drafts
from baton.planner.goodput import Measure
from baton.planner.node import SimulatedNode
from baton.planner.node_spec import NodeSpec
from baton.planner.plan import NodeKind, Question, find_plan
from baton.planner.report import to_json

# A step of 64 tokens takes hardly longer than one of a single token, and one of 512 takes ten times as long.
COSTS = StepCosts(((1, 0.010), (64, 0.011), (512, 0.100)), key_s=1e-8)
DRAFTS = MeanDrafts(accepted=1.0, drafted=2.0)
GOAL = Goal(ttft_s=2.0, tpot_s=0.012)
CHAT = Synthetic(Fixed(200), Fixed(100))


def test_drafts_bring_tokens_where_weights_cost_most_and_nothing_at_saturation() -> None:
    few = DRAFTS.step(COSTS, StepWork(4, 4000), seats=512)
    assert few.tokens == 2.0
    assert few.seconds == COSTS.seconds(StepWork(12, 12000)) + assumed_wait_s(12)
    assert few.rise_s == 1e-8 * 12 * 2.0
    many = DRAFTS.step(COSTS, StepWork(256, 256_000), seats=1024)
    assert many == (COSTS.seconds(StepWork(256, 256_000)), 1.0, 1e-8 * 256)
    assert NO_DRAFTS.step(COSTS, StepWork(4, 4000), seats=512).tokens == 1.0


def test_drafts_take_no_more_rows_than_there_are_seats() -> None:
    assert DRAFTS.step(COSTS, StepWork(4, 4000), seats=9).tokens == 1.5  # half of the drafts are 4 rows
    assert DRAFTS.step(COSTS, StepWork(4, 4000), seats=5).tokens == 1.0


def simulated(drafts: MeanDrafts, rate: float) -> Simulation:
    node = NodeSpec(COSTS, step_tokens=1024, seats=512, drafts=drafts)
    spec = ClusterSpec(0, 1, node, node, LocalPolicy.LOCAL)
    simulation = Simulation(spec, GOAL, CHAT.plan(rate, LengthSpan(requests=100), 1))
    simulation.run()
    return simulation


def test_every_request_gets_its_tokens_sooner_with_drafts() -> None:
    plain, drafted = (simulated(drafts, 0.5).jobs for drafts in (NO_DRAFTS, DRAFTS))
    assert len(plain) == len(drafted) == 100
    for before, after in zip(plain, drafted, strict=True):
        assert after.tpot_s < 0.66 * before.tpot_s  # a step and a wait for two tokens
        # Two tokens come together, so the gap between them and the next two is that of a step, of about 10 ms, and of
        # the device's wait for it, of about 2.5 ms.
        assert 1.2 < after.gap_quantile_s(0.9) / before.gap_quantile_s(0.9) < 1.3


def test_the_choice_of_nodes_sees_what_drafts_make_of_a_simulated_nodes_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[NodeView] = []
    report = SimulatedNode.report

    def watch(node: SimulatedNode, *given: Any) -> NodeView:
        seen.append(report(node, *given))
        return seen[-1]

    monkeypatch.setattr(SimulatedNode, "report", watch)
    simulated(NO_DRAFTS, 0.5)
    assert {view.pace for view in seen} == {None}
    seen.clear()
    simulated(DRAFTS, 0.5)
    assert {view.pace for view in seen if not view.decode_rows} == {PLAIN_PACE}
    paces = [view.pace for view in seen if view.decode_rows]
    assert paces
    assert all(pace is not None and pace.tokens == 2.0 and pace.step_ratio > 1.0 for pace in paces)


def test_a_plan_counts_drafts() -> None:
    kind = NodeKind(1, COSTS, COSTS, 800_000, 131072, 100e9)
    measure = Measure(requests=50, seconds=3.0, precision=0.05)
    plans = [
        find_plan(Question(replace(kind, drafts=drafts), CHAT, GOAL, rate=None, gpus=1, measure=measure))
        for drafts in (NO_DRAFTS, DRAFTS)
    ]
    plain, drafted = plans
    assert drafted.best.rate > 1.2 * plain.best.rate
    assert drafted.demand.decode_s <= plain.demand.decode_s
    assert to_json(drafted, model="m", costs="c")["draft_tokens"] == {"accepted": 1.0, "drafted": 2.0}


def test_draft_tokens_are_given_as_what_a_step_accepts_and_verifies() -> None:
    assert parse_drafts("0.9/1.4") == MeanDrafts(0.9, 1.4)
    for wrong in ("", "0.9", "a/b", "2/1", "-1/2", "3/17", "nan/2"):
        with pytest.raises(InvalidRequest, match="ACCEPTED/DRAFTED"):
            parse_drafts(wrong)


def test_drafts_of_a_node_follow_from_its_counts() -> None:
    """Of 300 tokens 100 were drafts, so there were 200 steps of requests."""
    assert measured_drafts(generated=300, drafted=150, accepted=100) == MeanDrafts(0.5, 0.75)
    assert measured_drafts(generated=300, drafted=0, accepted=0) == NO_DRAFTS
    assert measured_drafts(generated=50, drafted=150, accepted=100) == NO_DRAFTS  # counts of other times
