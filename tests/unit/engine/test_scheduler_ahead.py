"""Scheduling one step ahead of the running one: its rows, its void rows, and when blocks are free again."""

import pytest

from baton.core.errors import Cancelled, InternalError, Overloaded
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, TokenOutput
from baton.engine.batch import Batch, BatchRow
from baton.engine.events import StepEvents
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import EOS, finish, launch, make, request, step


def rows(batch: Batch) -> dict[str, BatchRow]:
    return {row.request_id: row for row in batch.rows}


def tokens_of(events: StepEvents) -> list[tuple[str, int]]:
    return [(sampled.request_id, sampled.token.index) for sampled in events.tokens]


def free(scheduler: Scheduler) -> int:
    return scheduler.load().blocks_free


def two_steps(scheduler: Scheduler) -> tuple[Batch, Batch]:
    return launch(scheduler), launch(scheduler)


# ---- rows after a step in flight


def test_a_decode_continues_after_a_token_that_is_still_being_drawn() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    first, second = two_steps(scheduler)
    (row,) = second.rows
    assert (list(row.token_ids), row.token_start, row.token_source, len(row.block_ids)) == ([0], 5, 0, 2)
    assert row.sample is not None
    assert row.sample.output_index == 1
    assert tokens_of(finish(scheduler, first, 7)) == [("a", 0)]
    assert tokens_of(finish(scheduler, second, 8)) == [("a", 1)]
    row = launch(scheduler).rows[0]
    assert (list(row.token_ids), row.token_start, row.token_source) == ([8], 6, None)


def test_a_row_names_its_source_by_its_place_in_the_previous_step() -> None:
    scheduler = make()
    for name, length in (("a", 5), ("b", 1), ("c", 3)):
        scheduler.submit(request(name, length), 0.0)
    first, second = two_steps(scheduler)
    assert [row.request_id for row in first.rows] == ["b", "a", "c"]
    assert {name: row.token_source for name, row in rows(second).items()} == {"a": 1, "b": 0, "c": 2}


def test_two_steps_are_in_flight_at_most() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    first, _ = two_steps(scheduler)
    assert scheduler.schedule(0.0) is None
    assert scheduler.steps_in_flight == 2
    finish(scheduler, first)
    assert launch(scheduler).rows[0].token_source == 0


def test_new_and_admitted_requests_join_the_next_step() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    scheduler.reservations.reserve(request("b", 3), 0.0)
    launch(scheduler)
    scheduler.reservations.admit("b", TokenOutput(7, 0))
    scheduler.submit(request("c", 4), 0.0)
    second = rows(launch(scheduler))
    assert {name: (list(row.token_ids), row.token_source) for name, row in second.items()} == {
        "a": ([0], 0),
        "b": ([7], None),
        "c": ([ord("c") + 100] * 4, None),
    }


def test_chunks_follow_each_other_and_are_reported_when_their_own_step_ends() -> None:
    scheduler = make(tokens=6)
    scheduler.submit(request("a", 14), 0.0)
    first, second = two_steps(scheduler)
    assert [(row.token_start, row.token_stop) for row in (*first.rows, *second.rows)] == [(0, 6), (6, 12)]
    events = finish(scheduler, first)
    assert [start.request_id for start in events.started] == ["a"]
    assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks] == [(0, 6)]
    last = launch(scheduler)
    assert (last.rows[0].token_start, last.rows[0].token_stop, last.rows[0].token_source) == (12, 14, None)
    events = finish(scheduler, second)
    assert (events.started, events.tokens) == ((), ())
    assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks] == [(6, 12)]
    assert tokens_of(finish(scheduler, last)) == [("a", 0)]


def test_end_tokens_are_forbidden_by_index_also_ahead() -> None:
    scheduler = make()
    scheduler.submit(request("a", 3, sampling=ResolvedSampling(max_tokens=9, min_tokens=1)), 0.0)
    samples = [batch.rows[0].sample for batch in two_steps(scheduler)]
    assert [sample and sample.forbidden for sample in samples] == [(EOS,), ()]


def test_the_history_of_a_penalised_request_lacks_the_token_that_is_being_drawn() -> None:
    scheduler = make()
    sampling = ResolvedSampling(max_tokens=9, temperature=0.0, repetition_penalty=1.1)
    scheduler.submit(request("a", (1, 2, 3), sampling=sampling), 0.0)
    first, second = two_steps(scheduler)
    samples = [batch.rows[0].sample for batch in (first, second)]
    assert [sample and (list(sample.history), sample.output_index) for sample in samples] == [
        ([1, 2, 3], 0),
        ([1, 2, 3], 1),
    ]
    finish(scheduler, first, 7)
    sample = launch(scheduler).rows[0].sample
    assert sample is not None
    assert (list(sample.history), sample.output_index) == ([1, 2, 3, 7], 2)


def test_a_row_has_the_same_block_array_until_its_blocks_change() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    seen = []
    for _ in range(5):
        batch = launch(scheduler)
        seen.append(batch.rows[0].block_ids)
        finish(scheduler, batch)
    assert [len(block_ids) for block_ids in seen] == [2, 2, 2, 2, 3]
    assert all(block_ids is seen[0] for block_ids in seen[:4])
    assert seen[4][:2] == seen[0]


# ---- ends that are known beforehand


@pytest.mark.parametrize("prefill_only", [True, False])
def test_a_request_certain_to_end_has_no_row_in_the_next_step(*, prefill_only: bool) -> None:
    scheduler = make()
    sampling = ResolvedSampling(max_tokens=50 if prefill_only else 1, temperature=0.0)
    scheduler.submit(request("a", 5, prefill_only=prefill_only, sampling=sampling), 0.0)
    first = launch(scheduler)
    assert scheduler.schedule(0.0) is None
    assert tokens_of(finish(scheduler, first)) == [("a", 0)]
    assert (scheduler.steps_in_flight, scheduler.load().requests_running) == (0, 0)


def test_no_request_runs_past_the_end_of_the_context() -> None:
    scheduler = make(num_blocks=2)
    scheduler.submit(request("a", 6), 0.0)
    first, second = two_steps(scheduler)
    finish(scheduler, first)
    assert scheduler.schedule(0.0) is None
    assert finish(scheduler, second).tokens[0].finish_reason is FinishReason.LENGTH


def test_a_full_seat_is_taken_again_only_when_its_request_is_over() -> None:
    scheduler = make(requests=1)
    for name in "ab":
        scheduler.submit(request(name, 3, sampling=ResolvedSampling(max_tokens=1)), 0.0)
    first = launch(scheduler)
    assert scheduler.schedule(0.0) is None
    finish(scheduler, first)
    assert set(rows(launch(scheduler))) == {"b"}


# ---- ends that are not known beforehand


@pytest.mark.parametrize(("end", "stop_reason"), [(EOS, ""), (7, "7")])
def test_the_row_after_an_end_token_is_void_and_keeps_the_blocks_for_one_more_step(end: int, stop_reason: str) -> None:
    scheduler = make()
    scheduler.submit(request("a", 5, sampling=ResolvedSampling(max_tokens=50, stop_token_ids=(7,))), 0.0)
    first, second = two_steps(scheduler)
    events = finish(scheduler, first, end)
    assert [(sampled.finish_reason, sampled.stop_reason) for sampled in events.tokens] == [
        (FinishReason.STOP, stop_reason)
    ]
    assert (free(scheduler), scheduler.load().requests_running) == (30, 0)
    assert scheduler.schedule(0.0) is None
    events = finish(scheduler, second)
    assert (events.step, events.started, events.chunks, events.tokens, events.failed) == (2, (), (), (), ())
    assert free(scheduler) == 32


def test_blocks_of_a_void_row_are_given_to_no_other_request() -> None:
    scheduler = make(num_blocks=4)
    scheduler.submit(request("a", 5), 0.0)
    first, second = two_steps(scheduler)
    finish(scheduler, first, EOS)
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("b", 9), 0.0)
    reservation = scheduler.reservations.reserve(request("c", 5), 0.0)
    assert set(reservation.block_ids).isdisjoint(second.rows[0].block_ids)
    scheduler.submit(request("d", 9), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.abort("c")
    finish(scheduler, second)
    assert set(step(scheduler)[0]) == {"d"}


def test_the_block_of_a_void_row_is_never_matched() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(7)), 0.0)
    first, second = two_steps(scheduler)
    finish(scheduler, first, EOS)
    assert scheduler.reservations.reserve(request("b", (*range(7), EOS, 1)), 0.0).cached_tokens == 4
    finish(scheduler, second)
    assert scheduler.reservations.reserve(request("c", (*range(7), EOS, 1)), 0.0).cached_tokens == 4


def test_a_block_is_matched_only_when_all_its_tokens_are_known_and_computed() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(7)), 0.0)
    first, second = two_steps(scheduler)
    sequence = (*range(7), 5, 1)
    assert scheduler.reservations.reserve(request("b", sequence), 0.0).cached_tokens == 0
    finish(scheduler, first, 5)
    assert scheduler.reservations.reserve(request("c", sequence), 0.0).cached_tokens == 4
    finish(scheduler, second)
    assert scheduler.reservations.reserve(request("d", sequence), 0.0).cached_tokens == 8


def test_an_id_is_free_when_its_request_has_ended_and_abort_says_when_the_blocks_are() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    first, second = two_steps(scheduler)
    finish(scheduler, first, EOS)
    assert scheduler.abort("a")
    finish(scheduler, second)
    assert not scheduler.abort("a")
    scheduler.submit(request("a", 5), 0.0)
    first, second = two_steps(scheduler)
    finish(scheduler, first, EOS)
    scheduler.submit(request("a", 6), 0.0)
    assert finish(scheduler, second).tokens == ()
    assert tokens_of(step(scheduler)[1]) == [("a", 0)]


def test_an_abort_waits_for_both_steps_that_have_a_row_of_the_request() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.submit(request(name, 5), 0.0)
    first, second = two_steps(scheduler)
    assert scheduler.abort("a")
    assert tokens_of(finish(scheduler, first)) == [("b", 0)]
    assert scheduler.abort("a")
    assert free(scheduler) == 28
    assert tokens_of(finish(scheduler, second)) == [("b", 1)]
    assert not scheduler.abort("a")
    assert free(scheduler) == 30


def test_an_abort_waits_for_the_next_step_when_only_that_has_a_row() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    first = launch(scheduler)
    scheduler.submit(request("b", 5), 0.0)
    second = launch(scheduler)
    assert scheduler.abort("b")
    finish(scheduler, first)
    assert free(scheduler) == 28
    assert tokens_of(finish(scheduler, second)) == [("a", 1)]
    assert free(scheduler) == 30


# ---- failures


def test_a_failed_step_voids_only_the_next_rows_of_its_own_requests() -> None:
    scheduler = make(tokens=6)
    scheduler.submit(request("a", 5), 0.0)
    scheduler.submit(request("b", 5), 0.0)
    first = launch(scheduler)
    scheduler.submit(request("c", 1), 0.0)
    second = launch(scheduler)
    assert [(row.request_id, len(row.token_ids)) for row in first.rows] == [("b", 1), ("a", 5)]
    assert set(rows(second)) == {"a", "b", "c"}
    error = InternalError("the step failed")
    events = scheduler.fail(error, 0.25)
    assert (events.step, events.seconds) == (1, 0.25)
    assert [(failed.request_id, failed.error) for failed in events.failed] == [("b", error), ("a", error)]
    assert (free(scheduler), scheduler.load().requests_running) == (27, 1)
    assert tokens_of(finish(scheduler, second)) == [("c", 0)]
    assert free(scheduler) == 31
    # KV of a failed step, and KV computed from it, is never shared.
    assert scheduler.reservations.reserve(request("d", [ord("a") + 100] * 6), 0.0).cached_tokens == 0


def test_when_the_next_step_fails_too_no_request_fails_twice() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    two_steps(scheduler)
    error = InternalError("the device is gone")
    assert [failed.request_id for failed in scheduler.fail(error, 0.0).failed] == ["a"]
    assert scheduler.fail(error, 0.0).failed == ()
    assert free(scheduler) == 32


def test_a_request_fails_with_the_second_step_after_its_token_of_the_first() -> None:
    scheduler = make()
    scheduler.submit(request("a", 5), 0.0)
    first, _ = two_steps(scheduler)
    assert tokens_of(finish(scheduler, first)) == [("a", 0)]
    third = launch(scheduler)
    assert [failed.request_id for failed in scheduler.fail(InternalError("failed"), 0.0).failed] == ["a"]
    assert finish(scheduler, third).tokens == ()
    assert free(scheduler) == 32


def test_fail_all_ends_both_steps_in_flight() -> None:
    scheduler = make()
    for name in "abc":
        scheduler.submit(request(name, 4), 0.0)
    first, _ = two_steps(scheduler)
    scheduler.abort("a")
    results = [TokenOutput(EOS if row.request_id == "b" else 5, 0) for row in first.rows]
    scheduler.complete(results, 0.0)
    assert free(scheduler) == 26
    events = scheduler.fail_all(Cancelled("closing"))
    assert [failed.request_id for failed in events.failed] == ["c"]
    assert (free(scheduler), scheduler.steps_in_flight) == (32, 0)


# ---- when blocks run out


def test_no_request_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    for name, length in (("a", 7), ("b", 6)):
        scheduler.submit(request(name, length), 0.0)
    given: dict[str, list[int]] = {"a": [], "b": []}
    while True:
        first = launch(scheduler)
        second = scheduler.schedule(0.0)
        for batch in filter(None, (first, second)):
            for name, index in tokens_of(finish(scheduler, batch)):
                given[name].append(index)
        if second is None:
            break
        assert scheduler.load().preemptions == 0
    # Both have their tokens of the step; only now the latest request is preempted.
    assert given["a"] == given["b"] == list(range(len(given["a"])))
    assert scheduler.load().preemptions == 0
    assert [row.request_id for row in launch(scheduler).rows] == ["a"]
    assert scheduler.load().preemptions == 1


def test_a_block_that_becomes_free_meanwhile_saves_the_latest_request_from_preemption() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.submit(request("a", 7, sampling=ResolvedSampling(max_tokens=3)), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    first = launch(scheduler)
    second = launch(scheduler)
    finish(scheduler, first)
    third = launch(scheduler)
    finish(scheduler, second)
    assert scheduler.schedule(0.0) is None
    assert [(sampled.request_id, sampled.finish_reason) for sampled in finish(scheduler, third).tokens] == [
        ("a", FinishReason.LENGTH),
        ("b", None),
    ]
    assert set(rows(launch(scheduler))) == {"b"}
    assert scheduler.load().preemptions == 0


def test_rows_of_a_preempted_request_have_its_new_blocks() -> None:
    scheduler = make(num_blocks=5, tokens=8, prefix_cache=False)
    scheduler.submit(request("a", 7), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    of_b = []
    while scheduler.load().preemptions == 0:
        batch = launch(scheduler)
        of_b += [row.block_ids for row in batch.rows if row.request_id == "b"]
        finish(scheduler, batch)
    scheduler.abort("a")
    batch = launch(scheduler)
    (row,) = batch.rows
    (chunk,) = finish(scheduler, batch).chunks
    assert tuple(row.block_ids) == chunk.block_ids[:2]
    assert len(of_b[-1]) == len(row.block_ids) == 2
    assert row.block_ids != of_b[-1]


# ---- a whole generation


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_come_in_order_and_once(*, ahead: bool) -> None:
    scheduler = make(num_blocks=12, tokens=5, requests=3, prefix_cache=False)
    names = "abcde"
    for index, name in enumerate(names):
        sampling = ResolvedSampling(max_tokens=4 + index, temperature=0.0)
        scheduler.submit(request(name, 3 + 2 * index, sampling=sampling), 0.0)
    given: dict[str, list[int]] = {name: [] for name in names}
    in_flight: list[Batch] = []
    while (batch := scheduler.schedule(0.0)) is not None or in_flight:
        if batch is not None:
            in_flight.append(batch)
        if batch is None or not ahead or len(in_flight) == 2:
            for name, index in tokens_of(finish(scheduler, in_flight.pop(0))):
                given[name].append(index)
    assert given == {name: list(range(4 + index)) for index, name in enumerate(names)}
    assert free(scheduler) == 12
