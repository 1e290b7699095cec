"""Scheduling: what runs in a step, which requests wait or are preempted, and how requests end."""

import pytest

from baton.core.errors import Cancelled, InternalError, InvalidRequest, Overloaded, UnknownLease
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, TokenOutput
from baton.engine.request import EngineLimits, EngineRequest
from tests.unit.engine.scheduling import EOS, VOCAB_SIZE, finish, make, request, step


def test_a_prompt_is_cut_to_the_budget_and_samples_with_its_last_chunk() -> None:
    scheduler = make(tokens=16)
    scheduler.submit(request("a", 40), 1.0)
    batch = scheduler.schedule(3.5)
    assert batch is not None
    events = finish(scheduler, batch)
    assert [(start.request_id, start.cached_tokens, start.queue_s) for start in events.started] == [("a", 0, 2.5)]
    assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks] == [(0, 16)]
    assert len(events.chunks[0].block_ids) == 11
    _, second = step(scheduler)
    assert (second.started, second.tokens) == ((), ())
    computed, third = step(scheduler)
    assert computed == {"a": 8}
    assert [(sampled.token.index, sampled.finish_reason) for sampled in third.tokens] == [(0, None)]
    computed, fourth = step(scheduler)
    assert computed == {"a": 1}
    assert fourth.chunks == ()


def test_several_prompts_share_a_step() -> None:
    scheduler = make(tokens=16)
    for name in "abc":
        scheduler.submit(request(name, 7), 0.0)
    assert step(scheduler)[0] == {"a": 7, "b": 7, "c": 2}
    assert step(scheduler)[0] == {"a": 1, "b": 1, "c": 5}


def test_decodes_come_first_and_prompts_get_the_rest_of_the_budget() -> None:
    scheduler = make(tokens=4, requests=8)
    for name in "abc":
        scheduler.submit(request(name, 1), 0.0)
    step(scheduler)
    scheduler.submit(request("d", 9), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert [(row.request_id, len(row.token_ids)) for row in batch.rows] == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_single_token_rows_come_before_longer_ones() -> None:
    scheduler = make(tokens=8)
    scheduler.submit(request("a", 5), 0.0)
    scheduler.submit(request("b", 1), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert [row.request_id for row in batch.rows] == ["b", "a"]


def test_no_more_requests_run_than_there_are_seats() -> None:
    scheduler = make(requests=2)
    for name in "abc":
        scheduler.submit(request(name, 2, sampling=ResolvedSampling(max_tokens=2, temperature=0.0)), 0.0)
    assert set(step(scheduler)[0]) == {"a", "b"}
    assert set(step(scheduler)[0]) == {"a", "b"}
    assert set(step(scheduler)[0]) == {"c"}


def test_no_request_starts_while_more_run_than_the_new_limits_have_seats() -> None:
    scheduler = make(requests=4)
    for name in "abc":
        scheduler.submit(request(name, 2, sampling=ResolvedSampling(max_tokens=9)), 0.0)
    assert set(step(scheduler)[0]) == {"a", "b", "c"}
    limits = EngineLimits(max_batch_tokens=16, max_batch_requests=2, max_waiting=8, prefix_cache=True)
    scheduler.set_limits(limits)
    scheduler.submit(request("d", 2), 0.0)
    assert set(step(scheduler)[0]) == {"a", "b", "c"}


def test_a_reserved_request_takes_a_seat_only_when_its_kv_is_here() -> None:
    scheduler = make(requests=2)
    for name in "ab":
        scheduler.reservations.reserve(request(name, 2), 0.0)
    with pytest.raises(Overloaded, match="2 for their KV"):
        scheduler.reservations.reserve(request("c", 2), 0.0)
    for name, count in (("c", 2), ("d", 9)):
        scheduler.submit(request(name, 2, sampling=ResolvedSampling(max_tokens=count)), 0.0)
    assert step(scheduler)[0].keys() == {"c", "d"}
    for name in "ba":
        assert scheduler.reservations.admit(name, TokenOutput(7, 0)) is None
    load = scheduler.load()
    assert (load.requests_running, load.requests_waiting, load.blocks_leased) == (2, 2, 0)
    with pytest.raises(Overloaded, match="2 requests wait for a seat"):
        scheduler.reservations.reserve(request("e", 2), 0.0)
    assert step(scheduler)[0].keys() == {"c", "d"}
    computed, events = step(scheduler)
    assert computed == {"a": 1, "d": 1}  # in order of arrival, without computing anything again
    assert events.chunks == ()
    assert not scheduler.abort("a")
    assert step(scheduler)[0] == {"b": 1, "d": 1}
    scheduler.reservations.reserve(request("e", 2), 0.0)


def test_a_prompt_prefilled_here_waits_with_its_blocks_for_a_seat() -> None:
    scheduler = make(requests=1)
    scheduler.submit(request("a", 2), 0.0)
    step(scheduler)
    blocks = scheduler.reservations.reserve(request("b", 9), 0.0).block_ids
    scheduler.reservations.prefill_here("b", (), 1.0)
    assert set(step(scheduler)[0]) == {"a"}
    scheduler.abort("a")
    batch = scheduler.schedule(4.0)
    assert batch is not None
    events = finish(scheduler, batch)
    assert events.started[0].queue_s == 3.0
    assert events.chunks[0].block_ids == blocks
    assert scheduler.load().preemptions == 0


def test_a_prompt_waits_until_all_its_blocks_are_free_and_no_request_overtakes_it() -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(request("a", 12, prefill_only=True), 0.0)
    step(scheduler)
    scheduler.submit(request("b", 20), 0.0)
    scheduler.submit(request("c", 2), 0.0)
    assert scheduler.schedule(0.0) is None
    scheduler.abort("a")
    assert step(scheduler)[0] == {"b": 16}


def test_the_latest_request_is_preempted_and_recomputed_without_drawing_again() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.submit(request("a", 7), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    step(scheduler, token_id=11)
    given = [11]
    while scheduler.load().preemptions == 0:
        computed, events = step(scheduler, token_id=12)
        given += [sampled.token.token_id for sampled in events.tokens if sampled.request_id == "b"]
    assert computed == {"a": 1}
    assert scheduler.load().requests_waiting == 1
    scheduler.abort("a")
    batch = scheduler.schedule(0.0)
    assert batch is not None
    (row,) = batch.rows
    assert list(row.token_ids) == [*request("b", 6).prompt, *given]
    assert row.sample is not None
    assert row.sample.output_index == len(given)
    events = finish(scheduler, batch)
    assert events.started == ()
    assert [sampled.token.index for sampled in events.tokens] == [len(given)]


def test_a_decode_is_preempted_itself_rather_than_taking_blocks_of_a_prefill_only_request() -> None:
    scheduler = make(num_blocks=4, prefix_cache=False)
    scheduler.submit(request("a", 3), 0.0)
    step(scheduler)
    scheduler.submit(request("b", 8, prefill_only=True), 0.0)
    while scheduler.load().requests_running:
        assert scheduler.load().preemptions == 0
        batch = scheduler.schedule(0.0)
        if batch is not None:
            finish(scheduler, batch)
    load = scheduler.load()
    assert (load.preemptions, load.requests_waiting, load.blocks_leased, load.blocks_free) == (1, 1, 2, 2)


def test_a_prefill_only_request_holds_its_blocks_until_abort() -> None:
    scheduler = make()
    scheduler.submit(request("a", 8, prefill_only=True), 0.0)
    _, events = step(scheduler)
    assert [sampled.finish_reason for sampled in events.tokens] == [None]
    assert scheduler.schedule(0.0) is None
    assert (scheduler.load().blocks_leased, scheduler.load().requests_running) == (2, 0)
    scheduler.abort("a")
    scheduler.abort("a")
    assert scheduler.load().blocks_free == 32


def test_a_cached_prefix_is_not_computed_again_but_one_token_always_is() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(16), prefill_only=True), 0.0)
    step(scheduler)
    scheduler.submit(request("b", range(16)), 0.0)
    computed, events = step(scheduler)
    assert computed == {"b": 4}
    assert events.started[0].cached_tokens == 12
    assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks] == [(12, 16)]


def test_decoded_blocks_are_cached_too() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(6), sampling=ResolvedSampling(max_tokens=4, temperature=0.0)), 0.0)
    for _ in range(4):
        step(scheduler, token_id=5)
    reservation = scheduler.reservations.reserve(request("b", (*range(6), 5, 5, 5, 5, 5)), 0.0)
    assert reservation.cached_tokens == 8


def test_blocks_of_a_chunk_are_not_shared_before_they_are_computed() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(16)), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert scheduler.reservations.reserve(request("b", range(16)), 0.0).cached_tokens == 0
    finish(scheduler, batch)
    assert scheduler.reservations.reserve(request("c", range(16)), 0.0).cached_tokens == 12


def test_reserved_blocks_match_no_request_before_admit() -> None:
    scheduler = make()
    reservation = scheduler.reservations.reserve(request("a", range(9)), 0.0)
    assert (len(reservation.block_ids), reservation.cached_tokens) == (3, 0)
    assert scheduler.reservations.reserve(request("b", range(9)), 0.0).cached_tokens == 0
    scheduler.reservations.admit("a", TokenOutput(7, 0))
    assert scheduler.reservations.reserve(request("c", range(9)), 0.0).cached_tokens == 8


def test_an_admitted_request_decodes_after_its_first_token() -> None:
    scheduler = make()
    scheduler.reservations.reserve(request("a", 9, output=(3, 4)), 0.0)
    assert scheduler.schedule(0.0) is None
    assert scheduler.reservations.admit("a", TokenOutput(7, 2)) is None
    batch = scheduler.schedule(0.0)
    assert batch is not None
    (row,) = batch.rows
    assert (list(row.token_ids), row.token_start) == ([7], 11)
    events = finish(scheduler, batch)
    assert [sampled.token.index for sampled in events.tokens] == [3]
    assert (events.started, events.chunks) == ((), ())


def test_a_first_token_that_is_also_the_last_ends_the_request() -> None:
    scheduler = make()
    scheduler.reservations.reserve(request("a", 9), 0.0)
    assert scheduler.reservations.admit("a", TokenOutput(EOS, 0)) is FinishReason.STOP
    assert scheduler.load().blocks_free == 32


@pytest.mark.parametrize("first", [TokenOutput(7, 1), TokenOutput(VOCAB_SIZE, 0)])
def test_a_first_token_that_is_not_the_next_one_is_refused(first: TokenOutput) -> None:
    scheduler = make()
    scheduler.reservations.reserve(request("a", 9), 0.0)
    with pytest.raises(InvalidRequest, match=r"first.token"):
        scheduler.reservations.admit("a", first)
    assert scheduler.load().blocks_leased == 3


def test_without_a_reservation_nothing_is_admitted() -> None:
    scheduler = make()
    scheduler.submit(request("a", 9), 0.0)
    for name in ("a", "unknown"):
        with pytest.raises(UnknownLease):
            scheduler.reservations.admit(name, TokenOutput(7, 0))
        with pytest.raises(UnknownLease):
            scheduler.reservations.prefill_here(name, (), 0.0)
        with pytest.raises(UnknownLease):
            scheduler.reservations.extend(name, ())


def test_prefill_here_computes_all_but_the_cached_tokens_and_the_given_output() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(8), prefill_only=True), 0.0)
    step(scheduler)
    scheduler.reservations.reserve(request("b", range(10)), 0.0)
    scheduler.reservations.prefill_here("b", (3, 4), 1.0)
    batch = scheduler.schedule(5.0)
    assert batch is not None
    (row,) = batch.rows
    assert (list(row.token_ids), row.token_start) == ([8, 9, 3, 4], 8)
    events = finish(scheduler, batch)
    assert (events.started[0].cached_tokens, events.started[0].queue_s) == (8, 4.0)
    assert events.tokens[0].token.index == 2


def test_prefill_here_waits_when_its_output_needs_a_block_that_is_not_there() -> None:
    scheduler = make(num_blocks=4)
    scheduler.reservations.reserve(request("a", 7), 0.0)
    scheduler.reservations.reserve(request("b", 7), 0.0)
    scheduler.reservations.prefill_here("a", (1, 2), 0.0)
    assert (scheduler.load().requests_waiting, scheduler.load().blocks_free) == (1, 2)
    assert scheduler.schedule(0.0) is None
    scheduler.abort("b")
    assert step(scheduler)[0] == {"a": 9}


def test_a_reservation_grows_with_the_output_and_keeps_its_blocks() -> None:
    scheduler = make(num_blocks=4)
    first = scheduler.reservations.reserve(request("a", 7), 0.0)
    grown = scheduler.reservations.extend("a", (1,))
    assert grown.block_ids[:2] == first.block_ids
    assert len(grown.block_ids) == 3
    scheduler.reservations.reserve(request("b", 3), 0.0)
    with pytest.raises(Overloaded):
        scheduler.reservations.extend("a", (1, 2, 3, 4, 5))
    assert scheduler.reservations.extend("a", (1,)) == grown
    with pytest.raises(InvalidRequest, match="does not begin with"):
        scheduler.reservations.extend("a", (2,))


def test_reserve_leaves_room_for_waiting_requests_and_a_block_for_each_decode() -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(request("a", 6), 0.0)
    step(scheduler)
    # Six blocks are free: one is for a's next block, so five can be reserved.
    with pytest.raises(Overloaded):
        scheduler.reservations.reserve(request("b", 23), 0.0)
    scheduler.reservations.reserve(request("b", 19), 0.0)
    scheduler.abort("b")
    scheduler.submit(request("c", 6), 0.0)
    with pytest.raises(Overloaded) as refused:
        scheduler.reservations.reserve(request("b", 19), 0.0)
    assert refused.value.retry_after_s == 1.0


def test_more_than_max_waiting_requests_are_refused_unless_there_is_room() -> None:
    scheduler = make(num_blocks=8, waiting=0)
    scheduler.submit(request("a", 6), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    with pytest.raises(Overloaded, match="wait for room"):
        scheduler.submit(request("c", 20), 0.0)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (request("a", 0), "prompt"),
        (request("a", 100), "prompt"),
        (request("a", (1, VOCAB_SIZE)), "prompt"),
        (request("a", (1, -1)), "prompt"),
        (request("a", 3, output=(VOCAB_SIZE,)), "output"),
        (request("a", 3, output=(1, 2), sampling=ResolvedSampling(max_tokens=2)), "output"),
        (request("a", 3, sampling=ResolvedSampling(stop_token_ids=(2**31,))), "stop_token_ids"),
        (request("a", 3, sampling=ResolvedSampling(logit_bias={VOCAB_SIZE: 1.0})), "logit_bias"),
    ],
)
def test_a_request_that_could_never_run_is_refused_by_name(bad: EngineRequest, field: str) -> None:
    scheduler = make()
    with pytest.raises(InvalidRequest) as by_submit:
        scheduler.submit(bad, 0.0)
    with pytest.raises(InvalidRequest) as by_reserve:
        scheduler.reservations.reserve(bad, 0.0)
    assert by_submit.value.field == by_reserve.value.field == field


def test_the_refusal_of_a_long_prompt_names_the_longest_that_fits() -> None:
    scheduler = make(num_blocks=3)
    with pytest.raises(InvalidRequest, match="at most 11 tokens"):
        scheduler.submit(request("a", 12), 0.0)
    scheduler.submit(request("a", 11), 0.0)
    _, events = step(scheduler)
    assert events.tokens[0].finish_reason is FinishReason.LENGTH


def test_a_second_request_of_one_id_is_refused() -> None:
    scheduler = make()
    scheduler.submit(request("a", 3), 0.0)
    with pytest.raises(InvalidRequest, match="already exists"):
        scheduler.reservations.reserve(request("a", 3), 0.0)


@pytest.mark.parametrize(
    ("sampling", "drawn", "reasons", "stop_reason"),
    [
        (ResolvedSampling(max_tokens=2), [5, 5], [None, FinishReason.LENGTH], ""),
        (ResolvedSampling(max_tokens=9), [EOS], [FinishReason.STOP], ""),
        (ResolvedSampling(max_tokens=2, ignore_eos=True), [EOS, EOS], [None, FinishReason.LENGTH], ""),
        (ResolvedSampling(max_tokens=9, stop_token_ids=(7,)), [5, 7], [None, FinishReason.STOP], "7"),
        (ResolvedSampling(max_tokens=9, min_tokens=2), [5, 5, EOS], [None, None, FinishReason.STOP], ""),
        (ResolvedSampling(max_tokens=1), [EOS], [FinishReason.STOP], ""),
    ],
)
def test_outputs_end_by_the_finish_rules(
    sampling: ResolvedSampling, drawn: list[int], reasons: list[FinishReason | None], stop_reason: str
) -> None:
    scheduler = make()
    scheduler.submit(request("a", 3, sampling=sampling), 0.0)
    sampled = [step(scheduler, token_id)[1].tokens[0] for token_id in drawn]
    assert [token.finish_reason for token in sampled] == reasons
    assert sampled[-1].stop_reason == stop_reason
    assert scheduler.schedule(0.0) is None
    assert scheduler.load().blocks_free == 32


def test_end_tokens_are_forbidden_until_min_tokens_are_given() -> None:
    scheduler = make()
    sampling = ResolvedSampling(max_tokens=9, min_tokens=1, stop_token_ids=(7,))
    scheduler.submit(request("a", 3, sampling=sampling), 0.0)
    forbidden = []
    for _ in range(2):
        batch = scheduler.schedule(0.0)
        assert batch is not None
        assert batch.rows[0].sample is not None
        forbidden.append(batch.rows[0].sample.forbidden)
        finish(scheduler, batch)
    assert forbidden == [(7, EOS), ()]


def test_the_context_ends_a_request() -> None:
    scheduler = make(num_blocks=2)
    scheduler.submit(request("a", 6), 0.0)
    assert step(scheduler)[1].tokens[0].finish_reason is None
    assert step(scheduler)[1].tokens[0].finish_reason is FinishReason.LENGTH


def test_an_aborted_request_in_a_step_is_freed_after_it_and_causes_no_event() -> None:
    scheduler = make()
    scheduler.submit(request("a", 6), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    assert scheduler.abort("a")
    assert scheduler.abort("a")
    assert scheduler.load().blocks_free == 28
    events = finish(scheduler, batch)
    assert [event.request_id for event in events.started] == ["b"]
    assert [event.request_id for event in events.chunks] == ["b"]
    assert [sampled.request_id for sampled in events.tokens] == ["b"]
    assert scheduler.load().blocks_free == 30
    assert not scheduler.abort("a")


def test_requests_come_and_go_while_a_step_is_in_flight() -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(request("a", 4), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.submit(request("b", 4), 0.0)
    reserved = scheduler.reservations.reserve(request("c", 4), 0.0)
    assert set(reserved.block_ids).isdisjoint(batch.rows[0].block_ids)
    assert not scheduler.abort("b")
    assert scheduler.reservations.admit("c", TokenOutput(5, 0)) is None
    assert not scheduler.abort("c")
    finish(scheduler, batch)
    assert set(step(scheduler)[0]) == {"a"}


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    scheduler = make(tokens=6)
    scheduler.submit(request("a", 6), 0.0)
    scheduler.submit(request("b", 6), 0.0)
    assert scheduler.schedule(0.0) is not None
    error = InternalError("the step failed")
    events = scheduler.fail(error, 0.0)
    assert [(failed.request_id, failed.error) for failed in events.failed] == [("a", error)]
    assert set(step(scheduler)[0]) == {"b"}
    # KV of a failed step is never shared.
    assert scheduler.reservations.reserve(request("c", [ord("a") + 100] * 6), 0.0).cached_tokens == 0


def test_a_prefill_only_request_whose_step_failed_holds_its_blocks_until_abort() -> None:
    """KV of its earlier chunks may be on its way."""
    scheduler = make(tokens=6)
    scheduler.submit(request("a", 12, prefill_only=True), 0.0)
    step(scheduler)
    assert scheduler.schedule(0.0) is not None
    events = scheduler.fail(InternalError("the step failed"), 0.0)
    assert [failed.request_id for failed in events.failed] == ["a"]
    load = scheduler.load()
    assert (load.blocks_leased, load.requests_running) == (3, 0)
    assert scheduler.schedule(0.0) is None
    assert not scheduler.abort("a")
    assert scheduler.load().blocks_free == load.blocks_total


def test_fail_all_ends_every_request_once() -> None:
    scheduler = make(tokens=6)
    scheduler.submit(request("h", 2, prefill_only=True), 0.0)
    step(scheduler)
    scheduler.reservations.reserve(request("r", 2), 0.0)
    for name in "abc":
        scheduler.submit(request(name, 4), 0.0)
    assert scheduler.schedule(0.0) is not None
    scheduler.abort("a")
    events = scheduler.fail_all(Cancelled("closing"))
    assert {failed.request_id for failed in events.failed} == {"r", "b", "c"}
    assert scheduler.load().blocks_free == 32


def test_load_counts_waiting_tokens() -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(request("a", 20), 0.0)
    scheduler.submit(request("b", 10), 0.0)
    assert scheduler.load().tokens_waiting == 30
    step(scheduler)
    load = scheduler.load()
    assert (load.tokens_waiting, load.requests_running, load.requests_waiting) == (14, 1, 1)
    assert (load.blocks_total, load.blocks_free, load.blocks_leased, load.requests_total) == (8, 2, 0, 2)
