"""Step costs expire: what a node measured while its machine was busy is forgotten once the node gets no work."""

from collections.abc import Sequence

import pytest

from baton.core.costs import StepCosts, mixed
from baton.gateway.fleet.node_costs import DECODE_STEP, PROMPT_STEP, NodeCosts, current_costs

TRUE = StepCosts(((1, 0.008), (512, 0.05)), key_s=2e-8, pair_s=1e-9)
PREFILL, DECODE = (1,), (2,)


def times(factor: float, costs: StepCosts = TRUE) -> StepCosts:
    points = tuple((tokens, factor * seconds) for tokens, seconds in costs.points)
    return StepCosts(points, factor * costs.key_s, factor * costs.pair_s, factor * costs.decode_row_s)


def node(
    factor: float, worked_at_s: float, *, kind: tuple[int, ...] = DECODE, profile: StepCosts | None = None
) -> NodeCosts:
    return NodeCosts(DECODE_STEP if kind == DECODE else PROMPT_STEP, kind, times(factor), profile, worked_at_s)


def factors(nodes: Sequence[NodeCosts]) -> list[float]:
    """The nodes' costs now, as multiples of the true ones."""
    found = current_costs(nodes)
    return [
        costs.seconds(each.typical) / TRUE.seconds(each.typical)
        for each, costs in zip(nodes, found, strict=True)
        if costs
    ]


def test_a_node_that_works_keeps_the_costs_that_it_measures() -> None:
    assert factors([node(1.0, 60.0), node(10.0, 60.0)]) == [1.0, 10.0]


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_costs_of_a_node_that_gets_no_work_move_to_what_nodes_like_it_measure(wrong: float) -> None:
    ages = [0.0, 0.25, 0.5, 1.0, 2.0, 15.0]
    own = [factors([node(1.0, 60.0), node(wrong, 60.0 - age)])[1] for age in ages]
    assert own[0] == wrong
    assert own[-1] == 1.0
    assert own == sorted(own, reverse=wrong > 1)
    assert own[2] == pytest.approx(1.0 + (wrong - 1.0) / 2)


def test_costs_of_a_node_that_gets_no_work_move_to_its_own_profile_where_it_has_one() -> None:
    slower_card = times(3.0)
    nodes = [node(1.0, 60.0, profile=TRUE), node(9.0, 45.0, profile=slower_card)]
    assert 2.5 < factors(nodes)[1] < 3.1


def test_a_node_without_a_profile_is_tried_again_sooner() -> None:
    few_steps, profiled = (factors([node(1.0, 60.0), node(14.0, 58.0, profile=known)])[1] for known in (None, TRUE))
    assert few_steps < 2.0
    assert profiled > 7.0


def test_a_profile_of_a_busy_start_is_forgotten_later() -> None:
    busy = times(10.0)
    ages = [20.0, 60.0, 300.0, 3600.0]
    own = [factors([node(1.0, 4000.0, profile=TRUE), node(10.0, 4000.0 - age, profile=busy)])[1] for age in ages]
    assert own == sorted(own, reverse=True)
    assert own[0] > 7.0
    assert own[1] == pytest.approx(5.5)
    assert own[2] < 1.5
    assert own[3] == 1.0


def test_a_node_that_has_measured_less_than_its_profile_keeps_that_when_it_gets_no_work() -> None:
    nodes = [node(1.0, 60.0, profile=TRUE), node(1.2, 0.0, profile=times(10.0))]
    assert factors(nodes) == [1.0, 1.2]


def test_a_pause_of_all_traffic_changes_no_costs() -> None:
    assert factors([node(1.0, 5.0), node(10.0, 5.0)]) == [1.0, 10.0]
    assert factors([node(1.0, float("-inf")), node(10.0, float("-inf"))]) == [1.0, 10.0]


def test_where_a_whole_role_gets_no_work_lower_costs_of_the_other_one_count() -> None:
    busy = node(1.0, 60.0, kind=PREFILL)
    assert factors([busy, node(10.0, 0.0), node(12.0, 0.0)])[1:] == pytest.approx([1.0, 1.0], rel=0.01)
    assert factors([node(5.0, 60.0, kind=PREFILL), node(1.0, 0.0), node(1.0, 0.0)])[1:] == [1.0, 1.0]


def test_nodes_whose_measurements_differ_by_noise_have_the_same_costs() -> None:
    first, second, slow = current_costs([node(1.0, 9.0), node(1.4, 9.0), node(4.0, 9.0)])
    assert first is second
    assert slow == times(4.0)
    profiled = [node(1.0, 9.0, profile=TRUE), node(1.4, 9.0, profile=times(1.4))]
    assert factors(profiled) == [1.0, 1.4]


def test_a_node_that_has_measured_nothing_has_no_costs_and_changes_no_others() -> None:
    unknown = NodeCosts(DECODE_STEP, DECODE)
    assert current_costs([unknown, node(2.0, 1.0)]) == [None, times(2.0)]


def test_mixed_costs_lie_between_the_two_at_every_step() -> None:
    half = mixed(TRUE, times(3.0, StepCosts(((16, 0.009), (2048, 0.3)))), 0.5)
    for tokens in (1, 16, 100, 512, 2048, 4000):
        other = times(3.0, StepCosts(((16, 0.009), (2048, 0.3))))
        assert half.dense_s(tokens) == pytest.approx((TRUE.dense_s(tokens) + other.dense_s(tokens)) / 2)


def test_a_report_of_equal_costs_changes_nothing_and_work_renews_them() -> None:
    costs = NodeCosts(DECODE_STEP)
    costs.report(times(1.0), None, kind=DECODE, works=False, now_s=1.0)
    first = costs.reported
    costs.report(times(1.0), None, kind=DECODE, works=False, now_s=2.0)
    assert costs.reported is first
    assert costs.worked_at_s == 1.0
    costs.report(times(1.0), None, kind=DECODE, works=True, now_s=3.0)
    assert costs.worked_at_s == 3.0
