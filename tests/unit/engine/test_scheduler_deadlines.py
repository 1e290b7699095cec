"""Prompts run by deadline; those that cannot meet theirs go last, or are refused, and none waits forever."""

from collections.abc import Iterator
from typing import Any

import pytest

from baton.core.costs import StepCosts
from baton.core.errors import Overloaded
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.slices import DEFAULT_TTFT_S
from tests.unit.engine.scheduling import finish, make, request

# A second for each token of a prompt.
COSTS = StepCosts(((1, 1.0), (100, 100.0)))


def computed(scheduler: Scheduler, now: float) -> list[str]:
    """The requests of one step, in the order of its rows."""
    batch = scheduler.schedule(now)
    if batch is None:
        return []
    finish(scheduler, batch)
    return [row.request_id for row in batch.rows]


def order(scheduler: Scheduler, *, now: float) -> Iterator[str]:
    """The requests as they run, one after the other, without time passing."""
    while names := computed(scheduler, now):
        yield from names


def test_waiting_prompts_run_by_deadline_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = make(tokens=4)
    for name, due_s in (("a", 9.0), ("b", 5.0), ("c", 9.0), ("d", 5.0), ("e", None)):
        scheduler.submit(request(name, 4, prefill_only=True, due_s=due_s), 0.0)
    assert list(order(scheduler, now=0.0)) == ["b", "d", "a", "c", "e"]


def test_priority_goes_before_deadline() -> None:
    scheduler = make(tokens=4)
    scheduler.submit(request("urgent", 4, prefill_only=True, due_s=1.0), 0.0)
    scheduler.submit(request("better", 4, prefill_only=True, due_s=9.0, priority=-1), 0.0)
    assert list(order(scheduler, now=0.0)) == ["better", "urgent"]


def test_an_urgent_prompt_interrupts_a_long_one_that_runs() -> None:
    scheduler = make(tokens=4)
    scheduler.submit(request("long", 12, prefill_only=True, due_s=9.0), 0.0)
    assert computed(scheduler, 0.0) == ["long"]
    scheduler.submit(request("urgent", 4, prefill_only=True, due_s=1.0), 0.0)
    assert list(order(scheduler, now=0.0)) == ["urgent", "long", "long"]
    assert scheduler.load().preemptions == 0


def test_a_request_without_a_deadline_is_due_after_a_bound() -> None:
    scheduler = make(tokens=4)
    scheduler.submit(request("none", 4, prefill_only=True), 0.0)
    scheduler.submit(request("before", 4, prefill_only=True, due_s=DEFAULT_TTFT_S - 1), 0.0)
    scheduler.submit(request("after", 4, prefill_only=True, due_s=DEFAULT_TTFT_S + 1), 0.0)
    assert list(order(scheduler, now=0.0)) == ["before", "none", "after"]


def test_a_late_request_goes_after_those_that_can_be_in_time_but_not_for_ever() -> None:
    scheduler = make(tokens=4, costs=COSTS)
    scheduler.submit(request("late", 8, prefill_only=True, due_s=7.0), 0.0)
    scheduler.submit(request("in time", 4, prefill_only=True, due_s=8.0), 0.0)
    scheduler.submit(request("later", 4, prefill_only=True, due_s=7.0 + DEFAULT_TTFT_S + 1), 0.0)
    assert list(order(scheduler, now=2.0)) == ["in time", "late", "late", "later"]


def test_a_running_prompt_that_becomes_late_lets_others_go_first() -> None:
    scheduler = make(tokens=4, costs=COSTS)
    scheduler.submit(request("long", 12, prefill_only=True, due_s=12.5), 0.0)
    assert computed(scheduler, 0.0) == ["long"]
    scheduler.submit(request("short", 4, prefill_only=True, due_s=13.0), 5.0)
    assert list(order(scheduler, now=5.0)) == ["short", "long", "long"]


def test_without_costs_a_request_is_late_when_its_deadline_has_passed() -> None:
    scheduler = make(tokens=4)
    scheduler.submit(request("a", 4, prefill_only=True, due_s=1.0), 0.0)
    scheduler.submit(request("b", 4, prefill_only=True, due_s=3.0), 0.0)
    assert list(order(scheduler, now=2.0)) == ["b", "a"]


def test_a_request_that_could_not_be_in_time_is_refused_at_submit_only_if_it_asks_for_that() -> None:
    scheduler = make(tokens=4, costs=COSTS)
    scheduler.submit(request("waits", 30, prefill_only=True), 0.0)
    scheduler.submit(request("late", 8, prefill_only=True, due_s=7.0), 0.0)
    scheduler.submit(request("none", 8, prefill_only=True, refuse_late=True), 0.0)
    with pytest.raises(Overloaded, match="cannot meet its deadline") as refused:
        scheduler.submit(request("refused", 8, prefill_only=True, due_s=7.0, refuse_late=True), 0.0)
    assert refused.value.retry_after_s == 46.0
    assert "shorter prompt" in str(refused.value.cure)
    assert scheduler.load().refused_late == 1
    scheduler.submit(request("exact", 7, prefill_only=True, due_s=7.0, refuse_late=True), 0.0)


def test_cached_tokens_count_when_a_request_is_judged() -> None:
    scheduler = make(costs=COSTS)
    scheduler.submit(request("a", range(16), prefill_only=True), 0.0)
    assert computed(scheduler, 0.0) == ["a"]
    scheduler.submit(request("b", range(16), prefill_only=True, due_s=4.0, refuse_late=True), 0.0)
    with pytest.raises(Overloaded):
        scheduler.submit(request("c", 16, prefill_only=True, due_s=4.0, refuse_late=True), 0.0)


def test_a_waiting_request_that_can_no_longer_be_in_time_fails_before_it_costs_anything() -> None:
    scheduler = make(tokens=4, costs=COSTS)
    for name in "abc":
        scheduler.submit(request(name, 4, prefill_only=True, due_s=6.0, refuse_late=name == "b"), 0.0)
    assert computed(scheduler, 0.0) == ["a"]
    assert scheduler.take_refused() is None
    assert computed(scheduler, 4.0) == ["c"]
    refused = scheduler.take_refused()
    assert refused is not None
    ((failed,),) = (refused.failed,)
    assert failed.request_id == "b"
    assert isinstance(failed.error, Overloaded)
    assert not scheduler.abort("b")
    assert scheduler.take_refused() is None
    load = scheduler.load()
    assert (load.refused_late, load.requests_waiting) == (1, 0)


def test_the_load_predicts_the_time_for_all_prompts_in_full_steps() -> None:
    costs = StepCosts(((1, 2.0), (4, 2.0), (8, 4.0)), pair_s=0.01)
    scheduler = make(tokens=4, costs=costs)
    for name in ("a", "b", "c"):
        scheduler.submit(request(name, 3, prefill_only=True), 0.0)
    load = scheduler.load()
    assert load.tokens_waiting == 9
    assert load.backlog_s == pytest.approx(3 * 2.0 + 3 * 0.06)
    list(order(scheduler, now=0.0))
    assert scheduler.load().backlog_s == 0.0


def test_the_load_has_the_decodes_and_their_contexts() -> None:
    scheduler = make(costs=COSTS)
    scheduler.submit(request("a", 5), 0.0)
    scheduler.submit(request("b", 3), 0.0)
    scheduler.submit(request("c", 40), 0.0)
    computed(scheduler, 0.0)
    load = scheduler.load()
    assert (load.decode_rows, load.context_tokens) == (2, 6 + 4)


def test_a_request_that_has_output_is_never_late() -> None:
    scheduler = make(tokens=4)
    scheduler.submit(request("in time", 4, prefill_only=True, due_s=9.0), 0.0)
    scheduler.submit(request("begun", 3, prefill_only=True, due_s=0.0, output=(1,)), 0.0)
    assert list(order(scheduler, now=1.0)) == ["begun", "in time"]


def test_the_decodes_of_a_node_count_when_a_prompt_is_judged() -> None:
    costs = StepCosts(((1, 0.005), (100, 0.005), (1100, 0.015)))
    late: dict[str, Any] = {"prefill_only": True, "refuse_late": True, "due_s": 0.02}
    scheduler = make(tokens=1100, num_blocks=100, costs=costs)
    scheduler.submit(request("alone", 90, **late), 0.0)
    assert computed(scheduler, 0.0) == ["alone"]
    scheduler.submit(request("stream", 4, tpot_s=0.0061), 0.0)
    assert computed(scheduler, 0.0) == ["stream"]
    # A slice of 128 tokens in every fourth step.
    with pytest.raises(Overloaded):
        scheduler.submit(request("next to it", 90, **{**late, "due_s": 0.0049}), 0.0)
    scheduler.submit(request("in time", 90, **late), 0.0)
    scheduler.abort("stream")
