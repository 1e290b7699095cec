"""On a node that computes prompts for others and decodes too, neither kind takes all the room."""

import pytest

from baton.core.errors import Overloaded
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import make, request, step


def decode(scheduler: Scheduler, name: str, num_tokens: int) -> None:
    """A request that decodes here."""
    scheduler.reservations.reserve(request(name, num_tokens), 0.0)
    scheduler.reservations.prefill_here(name, (), 0.0)


def run(scheduler: Scheduler, steps: int = 1) -> None:
    for _ in range(steps):
        step(scheduler)


def test_streams_leave_seats_for_prompts() -> None:
    scheduler = make(requests=4, stream_share=0.75)
    for name in "abc":
        decode(scheduler, name, 4)
    run(scheduler)
    with pytest.raises(Overloaded, match="decode elsewhere"):
        scheduler.reservations.reserve(request("d", 4), 0.0)
    scheduler.submit(request("p", 4, prefill_only=True), 0.0)
    counts, _ = step(scheduler)
    assert counts == {"a": 1, "b": 1, "c": 1, "p": 4}
    scheduler.abort("a")
    scheduler.reservations.reserve(request("d", 4), 0.0)


def test_streams_leave_blocks_for_prompts_but_blocks_of_prompts_are_not_theirs() -> None:
    scheduler = make(num_blocks=16, stream_share=0.75, tokens=64)
    scheduler.submit(request("p", 16, prefill_only=True), 0.0)
    run(scheduler)  # holds 4 of 16 blocks until it is released
    decode(scheduler, "a", 19)  # 5 blocks
    decode(scheduler, "b", 19)  # 10 of at most 12
    with pytest.raises(Overloaded, match="decode elsewhere"):
        scheduler.reservations.reserve(request("c", 11), 0.0)  # 3 blocks
    assert scheduler.load().blocks_free == 2
    scheduler.abort("b")
    decode(scheduler, "c", 11)


def test_a_block_that_prompts_share_gives_streams_no_more_room() -> None:
    scheduler = make(num_blocks=16, stream_share=0.5, tokens=64)
    for name in "pq":
        scheduler.submit(request(name, [7] * 16, prefill_only=True), 0.0)
        run(scheduler)
    decode(scheduler, "a", 19)  # 5 blocks of at most 8
    assert scheduler.load().blocks_free == 6, "`q` shares 3 of the 4 blocks of `p`"
    with pytest.raises(Overloaded, match="decode elsewhere"):
        scheduler.reservations.reserve(request("b", 15), 0.0)  # 4 blocks


def test_a_request_that_needs_more_than_the_share_runs_if_it_is_the_only_one() -> None:
    scheduler = make(num_blocks=16, requests=1, stream_share=0.75, tokens=64)
    decode(scheduler, "a", 55)
    assert step(scheduler)[0] == {"a": 55}
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("b", 4), 0.0)


def test_with_one_seat_both_kinds_take_turns() -> None:
    scheduler = make(requests=1, stream_share=0.75)
    scheduler.submit(request("p", 4, prefill_only=True), 0.0)
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("a", 4, since_s=1.0), 1.0)
    assert step(scheduler)[0] == {"p": 4}
    scheduler.submit(request("q", 4, prefill_only=True), 2.0)
    scheduler.reservations.reserve(request("a", 4, since_s=1.0), 3.0)  # it came before `q`
    scheduler.reservations.prefill_here("a", (), 3.0)
    assert step(scheduler)[0] == {"a": 4}


def test_a_prompt_waits_for_no_stream_that_came_after_it() -> None:
    scheduler = make(num_blocks=16, requests=4, stream_share=0.75, tokens=64)
    decode(scheduler, "a", 35)  # 9 blocks
    run(scheduler)
    scheduler.submit(request("p", 32, prefill_only=True), 0.0)  # 8 blocks, and 7 are free
    for name in "bc":
        with pytest.raises(Overloaded):
            scheduler.reservations.reserve(request(name, 4), 0.0)
    scheduler.abort("a")
    assert step(scheduler)[0] == {"p": 32}


def test_without_a_share_streams_may_take_all_seats() -> None:
    scheduler = make(requests=2)
    for name in "ab":
        decode(scheduler, name, 4)
    run(scheduler, 2)
    assert scheduler.load().decode_rows == 2
