"""Among waiting requests lower priorities run first; without room, the latest one of the worst priority gives way."""

import pytest

from baton.core.errors import Overloaded
from baton.core.sampling import ResolvedSampling
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import make, request, step


def busy() -> Scheduler:
    """A request holds all blocks until it is aborted."""
    scheduler = make(num_blocks=8, tokens=64)
    scheduler.submit(request("busy", 30, prefill_only=True), 0.0)
    step(scheduler)
    return scheduler


def test_lower_values_run_first_and_equal_ones_in_order_of_arrival() -> None:
    scheduler = busy()
    for name, priority in (("a", 1), ("b", 0), ("c", -5), ("d", 0), ("e", 1)):
        scheduler.submit(request(name, 31, prefill_only=True, priority=priority), 0.0)
    order = []
    last = "busy"
    for _ in range(5):
        scheduler.abort(last)
        ((last, _),) = step(scheduler)[0].items()
        order.append(last)
    assert order == ["c", "b", "d", "a", "e"]


def test_a_small_request_of_worse_priority_does_not_overtake_a_large_one() -> None:
    scheduler = busy()
    scheduler.submit(request("small", 1, prefill_only=True, priority=3), 0.0)
    scheduler.submit(request("large", 31, prefill_only=True, priority=2), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.abort("busy")
    assert step(scheduler)[0] == {"large": 31}


def test_a_running_request_does_not_give_way_to_a_waiting_one() -> None:
    scheduler = busy()
    scheduler.submit(request("urgent", 4, prefill_only=True, priority=-9), 0.0)
    assert scheduler.schedule(0.0) is None
    assert scheduler.load().preemptions == 0


@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((0, 0, 0), "c"), ((1, 0, 0), "a"), ((0, 1, 0), "b"), ((1, 1, 0), "b"), ((-1, -1, -2), "b")],
)
def test_the_latest_of_the_worst_priority_is_preempted(priorities: tuple[int, int, int], victim: str) -> None:
    scheduler = make(num_blocks=6, prefix_cache=False)
    for name, priority in zip("abc", priorities, strict=True):
        scheduler.submit(request(name, 3, priority=priority), 0.0)
    computed: dict[str, int] = {}
    while not scheduler.load().preemptions:
        computed, _ = step(scheduler)
    assert computed.keys() == set("abc") - {victim}


def test_a_preempted_request_runs_again_before_later_ones_of_its_priority_and_after_better_ones() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.submit(request("a", 7), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    step(scheduler)
    scheduler.submit(request("later", 16), 0.0)
    scheduler.submit(request("better", 16, priority=-1), 0.0)
    while not scheduler.load().preemptions:
        step(scheduler)
    order = []
    last = "a"
    for _ in range(3):
        scheduler.abort(last)
        ((last, _),) = step(scheduler)[0].items()
        order.append(last)
    assert order == ["better", "b", "later"]


def test_only_requests_that_go_first_take_room_from_a_reservation() -> None:
    scheduler = busy()
    scheduler.submit(request("waiting", 31), 0.0)
    scheduler.abort("busy")
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("equal", 10), 0.0)
    scheduler.reservations.reserve(request("better", 10, priority=-1), 0.0)


def test_a_queue_that_is_full_of_worse_requests_takes_a_better_one_only_if_it_can_run() -> None:
    scheduler = make(num_blocks=8, tokens=64, waiting=1)
    scheduler.submit(request("half", 16, prefill_only=True), 0.0)
    step(scheduler)
    scheduler.submit(request("large", 31, priority=1), 0.0)
    with pytest.raises(Overloaded):
        scheduler.submit(request("too-large", 31), 0.0)
    scheduler.submit(request("fits", 4), 0.0)
    assert step(scheduler)[0] == {"fits": 4}


def test_an_unfinished_prompt_of_better_priority_gets_the_budget_first() -> None:
    scheduler = make(tokens=8)
    for name, priority in (("a", 0), ("b", -1)):
        scheduler.reservations.reserve(
            request(name, 20, priority=priority, sampling=ResolvedSampling(max_tokens=2)), 0.0
        )
        scheduler.reservations.prefill_here(name, (), 0.0)
    assert step(scheduler)[0] == {"b": 8}
