"""Requests whose client has tokens go before newcomers, whatever the newcomers' deadlines."""

from typing import Any

import pytest

from baton.core.errors import Overloaded
from baton.core.types import DEFAULT_OBJECTIVE, TokenOutput, first_token_due_s
from baton.engine.request import EngineRequest
from baton.engine.scheduling.request_blocks import OwnerPlace
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.state import RequestPhase
from tests.unit.engine.limits import limits
from tests.unit.engine.scheduling import finish, make, request
from tests.unit.engine.test_scheduler_deadlines import COSTS, computed


def until_preempted(scheduler: Scheduler, now: float) -> list[str]:
    """The requests of the first step that preempted one."""
    while True:
        names = computed(scheduler, now)
        if scheduler.load().preemptions:
            return names


def stream(name: str, prompt: int, **given: Any) -> EngineRequest:
    return request(name, prompt, **given)


def test_a_newcomer_with_a_deadline_gives_way_to_an_old_stream_without_one() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.submit(stream("old", 6), 0.0)
    computed(scheduler, 0.0)
    scheduler.submit(stream("new", 6, due_s=1.5), 1.0)
    assert computed(scheduler, 1.0) == ["old", "new"]
    assert until_preempted(scheduler, 1.0) == ["old"]


def test_an_admitted_stream_is_as_old_as_its_reservation() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.reservations.reserve(stream("old", 6), 0.0)
    scheduler.submit(stream("new", 6, due_s=0.5), 0.0)
    computed(scheduler, 0.0)
    scheduler.reservations.admit("old", TokenOutput(7, 0))
    assert until_preempted(scheduler, 0.0) == ["old"]


def test_a_preempted_stream_runs_before_waiting_prompts_that_are_due() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    for name in "ab":
        scheduler.submit(stream(name, 7), 0.0)
    until_preempted(scheduler, 0.0)
    scheduler.submit(stream("due", 8, due_s=0.1), 0.0)
    scheduler.abort("a")
    assert computed(scheduler, 0.0)[0] == "b"


def test_a_preempted_stream_gets_the_next_seat_if_its_blocks_are_free() -> None:
    scheduler = make(num_blocks=7, requests=1, prefix_cache=False)
    scheduler.submit(stream("old", 12), 0.0)
    computed(scheduler, 0.0)
    with_two_reserved(scheduler)
    scheduler.abort("large")
    scheduler.reservations.admit("small", TokenOutput(7, 0))
    assert scheduler.load().requests_waiting == 2
    assert computed(scheduler, 0.0) == ["old"]


def test_a_ready_stream_runs_while_the_preempted_one_finds_no_blocks() -> None:
    scheduler = make(num_blocks=7, requests=1, prefix_cache=False)
    scheduler.submit(stream("old", 12), 0.0)
    computed(scheduler, 0.0)
    with_two_reserved(scheduler)
    scheduler.reservations.admit("small", TokenOutput(7, 0))
    assert computed(scheduler, 0.0) == ["small"]


def with_two_reserved(scheduler: Scheduler) -> None:
    """A stream of 16 tokens loses its 4 blocks, because the other 3 are reserved."""
    for name, length in (("large", 7), ("small", 3)):
        state = scheduler._requests.new_state(stream(name, length), 0.0)
        scheduler._blocks.take(state, OwnerPlace(0, [], 0))
        scheduler._roster.enter(state, RequestPhase.RESERVED)
    while not scheduler.load().preemptions:
        batch = scheduler.schedule(0.0)
        if batch is not None:
            finish(scheduler, batch)


def test_a_prompt_in_progress_does_not_wait() -> None:
    scheduler = make(tokens=64, costs=COSTS)
    assert scheduler._prompts._overdue([], 9.0, admit=True) == 0.0
    scheduler.submit(stream("long", 90), 0.0)
    computed(scheduler, 1.0)
    running = scheduler._roster.running
    assert scheduler._prompts._overdue(running, 9.0, admit=True) == 0.0
    scheduler.submit(stream("next", 4), 5.0)
    due_s = DEFAULT_OBJECTIVE.ttft_factor * COSTS.prompt_s(0, 4, step_tokens=64)
    assert scheduler._prompts._overdue(running, 9.0, admit=True) == pytest.approx(4.0 / due_s)
    assert scheduler._prompts._overdue(running, 9.0, admit=False) == 0.0


def test_a_prompt_whose_prefill_failed_elsewhere_has_waited_since_its_client_sent_it() -> None:
    scheduler = make(tokens=64, costs=COSTS)
    scheduler.reservations.reserve(stream("lost", 4, waited_s=1.0), 2.0)
    scheduler.reservations.prefill_here("lost", (), 5.0)
    due_s = first_token_due_s(COSTS.prompt_s(0, 4, step_tokens=64), DEFAULT_OBJECTIVE.ttft_factor)
    running = scheduler._roster.in_prompt()
    assert scheduler._prompts._overdue(running, 9.0, admit=True) == pytest.approx((1.0 + 3.0 + 4.0) / due_s)


def test_a_prompt_in_progress_that_can_no_longer_be_in_time_is_refused_if_it_asks_for_that() -> None:
    scheduler = make(tokens=4, costs=COSTS)
    scheduler.submit(stream("late", 12, prefill_only=True, due_s=13.0, refuse_late=True), 0.0)
    scheduler.submit(stream("here", 12, due_s=13.0, refuse_late=True), 0.0)
    assert computed(scheduler, 0.0) == ["late"]
    scheduler.submit(stream("next", 4, prefill_only=True), 6.0)
    assert computed(scheduler, 6.0) == ["next"]
    refused = scheduler.take_refused()
    assert refused is not None
    assert [failed.request_id for failed in refused.failed] == ["late", "here"]
    assert all(isinstance(failed.error, Overloaded) for failed in refused.failed)
    free = scheduler.load().blocks_free
    scheduler.abort("late")  # its KV may still be read until then
    assert scheduler.load().blocks_free > free
    assert scheduler.load().refused_late == 2


@pytest.mark.parametrize("ahead", [False, True])
def test_a_refused_prompt_in_progress_gives_its_blocks_back_after_its_last_step(*, ahead: bool) -> None:
    scheduler = make(tokens=4, costs=COSTS, prefix_cache=False)
    free = scheduler.load().blocks_free
    scheduler.submit(stream("here", 12, due_s=12.5, refuse_late=True), 0.0)
    first = scheduler.schedule(0.0)
    assert first is not None
    if not ahead:
        finish(scheduler, first)
    assert scheduler.schedule(6.0) is None
    assert scheduler.take_refused() is not None
    if ahead:
        assert scheduler.load().blocks_free < free
        assert finish(scheduler, first).chunks == ()
    assert scheduler.load().blocks_free == free


def test_there_are_no_more_seats_than_tokens_of_a_step() -> None:
    assert limits(max_batch_tokens=16, max_batch_requests=64).seats == 16
    assert limits(max_batch_tokens=64, max_batch_requests=16).seats == 16
