"""With measured costs, requests go where they would be served soonest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import StepCosts, StepWork
from baton.core.types import LocalPolicy, Slo
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.router import RoutedRequest, decode_s, pick_decode, pick_prefill
from tests.unit.gateway.test_router import address, node

FAST = StepCosts(((64, 0.005), (2048, 0.05)), key_s=1e-8, pair_s=1e-9, decode_row_s=1e-5)
SLOW = StepCosts(((64, 0.010), (2048, 0.10)), key_s=2e-8, pair_s=2e-9, decode_row_s=2e-5)
REQUEST = RoutedRequest(num_tokens=4096, policy=LocalPolicy.STRICT)
DECODE = node(9)


def prefill(number: int, **changes: object) -> NodeView:
    view = node(
        number,
        ready_peers=frozenset([9]),
        costs=FAST,
        max_batch_tokens=2048,
        max_context_tokens=100_000,
        room_tokens=1_600_000,
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def prefill_s(view: NodeView, wanted: RoutedRequest) -> float:
    return view.prefill_s(view.cached_tokens, wanted.num_tokens)


def pick(*nodes: NodeView, wanted: RoutedRequest = REQUEST) -> str | None:
    return address(pick_prefill(nodes, DECODE, wanted))


def test_work_that_a_cache_saves_is_worth_three_times_as_much_waiting() -> None:
    saved_s = prefill_s(prefill(1), REQUEST) - prefill_s(prefill(1, cached_tokens=2048), REQUEST)
    assert pick(prefill(1, cached_tokens=2048, backlog_s=2.5 * saved_s), prefill(2)) == "node-1"
    assert pick(prefill(1, cached_tokens=2048, backlog_s=3.5 * saved_s), prefill(2)) == "node-2"


def test_the_node_with_the_least_work_is_picked_of_those_that_are_soon_enough() -> None:
    request = replace(REQUEST, slo=Slo(ttft_s=2.0))
    assert pick(prefill(1, cached_tokens=2048, backlog_s=0.9), prefill(2), wanted=request) == "node-1"
    assert pick(prefill(1, cached_tokens=2048, backlog_s=1.1), prefill(2), wanted=request) == "node-2"


def test_the_soonest_node_is_picked_where_none_is_soon_enough() -> None:
    request = replace(REQUEST, slo=Slo(ttft_s=0.2))
    assert pick(prefill(1, cached_tokens=2048, backlog_s=0.2), prefill(2, backlog_s=0.2), wanted=request) == "node-1"
    assert pick(prefill(1, cached_tokens=2048, backlog_s=0.4), prefill(2, backlog_s=0.2), wanted=request) == "node-2"


def test_what_was_sent_since_the_report_takes_time_too() -> None:
    assert pick(prefill(1, tokens_since=4096), prefill(2, backlog_s=0.05)) == "node-2"
    assert pick(prefill(1, tokens_since=1024), prefill(2, backlog_s=0.05)) == "node-1"


def test_a_fast_node_takes_more() -> None:
    assert pick(prefill(1, costs=SLOW), prefill(2, backlog_s=0.05)) == "node-2"
    assert pick(prefill(1, costs=SLOW), prefill(2, backlog_s=0.5)) == "node-1"


def test_nearly_equal_nodes_take_turns() -> None:
    slightly_slower = StepCosts(((64, 0.0051), (2048, 0.051)), pair_s=1e-9)
    assert pick(prefill(1, turn=1), prefill(2, costs=slightly_slower)) == "node-2"


def test_a_session_stays_while_that_costs_next_to_nothing() -> None:
    request = replace(REQUEST, session_nodes={"node-1"})
    assert pick(prefill(1, turn=9, backlog_s=0.01), prefill(2), wanted=request) == "node-1"
    assert pick(prefill(1, turn=9, backlog_s=0.1), prefill(2), wanted=request) == "node-2"


def test_counts_decide_until_every_node_has_measured_its_costs() -> None:
    unmeasured = prefill(2, costs=None, tokens_waiting=10)
    assert pick(prefill(1, tokens_waiting=11, cached_tokens=0), unmeasured) == "node-2"
    assert pick(prefill(1, tokens_waiting=11, cached_tokens=16), unmeasured) == "node-1"


def decode(number: int, **changes: object) -> NodeView:
    view = prefill(number, max_batch_requests=8)
    return replace(view, **changes)  # type: ignore[arg-type]


def pick_for(*nodes: NodeView, **changes: object) -> str | None:
    wanted = replace(RoutedRequest(num_tokens=1000, policy=LocalPolicy.LOCAL), **changes)  # type: ignore[arg-type]
    return address(pick_decode(nodes, [], wanted))


def test_decodes_go_where_steps_are_short() -> None:
    assert (
        pick_for(decode(1, requests=2, context_tokens=200_000), decode(2, requests=4, context_tokens=20_000))
        == "node-2"
    )
    assert pick_for(decode(1, requests=7), decode(2, requests=1, costs=SLOW)) == "node-1"


def test_a_node_with_a_free_seat_comes_before_a_faster_one_without() -> None:
    assert pick_for(decode(1, requests=8), decode(2, requests=7, costs=SLOW)) == "node-2"


def test_kv_that_is_there_already_need_not_be_sent() -> None:
    nodes = (decode(1, turn=5, cached_tokens=40_000, context_tokens=10_000), decode(2, context_tokens=10_000))
    assert pick_for(*nodes, num_tokens=50_000) == "node-1"


@given(st.lists(st.integers(0, 8), min_size=1, max_size=4), st.integers(1, 4000))
def test_the_session_costs_at_most_a_little(backlogs: list[int], num_tokens: int) -> None:
    nodes = [prefill(number, backlog_s=backlog / 20) for number, backlog in enumerate(backlogs)]
    wanted = RoutedRequest(
        num_tokens=num_tokens, policy=LocalPolicy.STRICT, session_nodes={"node-0"}, slo=Slo(ttft_s=0.01)
    )
    picked = pick_prefill(nodes, DECODE, wanted)
    assert picked is not None
    best_s = min(prefill_s(view, wanted) for view in nodes)
    assert prefill_s(picked, wanted) <= 1.15 * best_s + 0.005


def test_unknown_costs_predict_nothing() -> None:
    unmeasured = prefill(1, costs=None)
    assert prefill_s(unmeasured, REQUEST) == decode_s(unmeasured, REQUEST) == float("inf")


@given(st.integers(1, 20_000), st.integers(0, 20_000), st.sampled_from([0, 64, 2048, 5000]))
def test_a_prompt_takes_the_backlog_and_what_its_steps_cost(stop: int, cached: int, step_tokens: int) -> None:
    view = prefill(1, cached_tokens=cached, backlog_s=0.5, max_batch_tokens=step_tokens)
    own_s = FAST.prompt_s(min(cached, stop - 1), stop, step_tokens=step_tokens or 2048)
    assert prefill_s(view, replace(REQUEST, num_tokens=stop)) == pytest.approx(0.5 + own_s)


@given(st.integers(0, 50), st.integers(0, 100_000), st.integers(1, 20_000))
def test_a_decode_step_is_predicted_with_the_request_as_one_more_row(rows: int, keys: int, num_tokens: int) -> None:
    view = decode(1, requests=rows, context_tokens=keys)
    expected_s = FAST.seconds(StepWork(decode_rows=rows + 1, keys=keys + num_tokens))
    assert decode_s(view, replace(REQUEST, num_tokens=num_tokens)) == pytest.approx(expected_s)
