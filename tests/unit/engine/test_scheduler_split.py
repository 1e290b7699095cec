"""Split prompts: the first part ends without a token, and the rest continues on KV that was received."""

from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.sampling import ResolvedSampling
from tests.unit.engine.scheduling import finish, launch, make, request, step

SCORING = ResolvedSampling(max_tokens=5, prompt_logprobs=1)


def test_the_first_part_ends_with_its_last_chunk_and_holds_its_blocks() -> None:
    scheduler = make(tokens=8)
    scheduler.submit(request("a", range(20), prefill_only=True, stop_tokens=12), 0.0)
    assert scheduler.load().tokens_waiting == 12
    assert step(scheduler)[0] == {"a": 8}
    batch = launch(scheduler)
    assert batch.rows[0].sample is None
    assert scheduler.schedule(0.0) is None
    events = finish(scheduler, batch)
    (chunk,) = events.chunks
    assert (chunk.token_start, chunk.token_stop, len(chunk.block_ids)) == (8, 12, 3)
    assert events.tokens == ()
    load = scheduler.load()
    assert (load.requests_running, load.blocks_leased, load.tokens_waiting) == (0, 3, 0)
    assert scheduler.reservations.reserve(request("b", range(16)), 0.0).cached_tokens == 12
    scheduler.abort("b")
    scheduler.abort("a")
    assert scheduler.load().blocks_free == 32


def test_a_first_part_that_is_cached_computes_its_last_block() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(16), prefill_only=True), 0.0)
    step(scheduler)
    scheduler.submit(request("b", range(16), prefill_only=True, stop_tokens=8), 0.0)
    computed, events = step(scheduler)
    assert computed == {"b": 4}
    assert events.started[0].cached_tokens == 4


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"stop_tokens": 0, "prefill_only": True}, "stop_tokens is 0 of 20 tokens"),
        ({"stop_tokens": 20, "prefill_only": True}, "stop_tokens is 20 of 20 tokens"),
        ({"stop_tokens": 8}, "prefill_only"),
        ({"stop_tokens": 8, "prefill_only": True, "sampling": SCORING}, "logprobs"),
    ],
)
def test_a_part_that_cannot_be_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        make().submit(request("a", 20, **given), 0.0)
    assert refused.value.field == "stop_tokens"


def test_the_rest_is_computed_after_what_was_received_and_both_are_cached() -> None:
    scheduler = make()
    scheduler.reservations.reserve(request("a", range(18)), 0.0)
    scheduler.reservations.prefill_here("a", (), 1.0, received_tokens=12)
    assert scheduler.reservations.reserve(request("b", range(18)), 1.0).cached_tokens == 12
    scheduler.abort("b")
    batch = scheduler.schedule(3.0)
    assert batch is not None
    (row,) = batch.rows
    assert (list(row.token_ids), row.token_start) == (list(range(12, 18)), 12)
    events = finish(scheduler, batch)
    assert (events.started[0].cached_tokens, events.started[0].queue_s) == (0, 2.0)
    assert [(chunk.token_start, chunk.token_stop) for chunk in events.chunks] == [(12, 18)]
    assert [sampled.token.index for sampled in events.tokens] == [0]
    assert scheduler.reservations.reserve(request("c", range(18)), 0.0).cached_tokens == 16


def test_received_kv_may_follow_cached_kv() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(8), prefill_only=True), 0.0)
    step(scheduler)
    assert scheduler.reservations.reserve(request("b", range(18)), 0.0).cached_tokens == 8
    scheduler.reservations.prefill_here("b", (), 0.0, received_tokens=16)
    computed, events = step(scheduler)
    assert computed == {"b": 2}
    assert events.started[0].cached_tokens == 8


def test_received_kv_that_was_cached_changes_nothing() -> None:
    scheduler = make()
    scheduler.submit(request("a", range(12), prefill_only=True), 0.0)
    step(scheduler)
    assert scheduler.reservations.reserve(request("b", range(18)), 0.0).cached_tokens == 12
    scheduler.reservations.prefill_here("b", (), 0.0, received_tokens=8)
    assert step(scheduler)[0] == {"b": 6}


@pytest.mark.parametrize("received", [10, 20, -4])
def test_tokens_that_cannot_have_been_received_are_refused_and_the_reservation_stays(received: int) -> None:
    scheduler = make()
    scheduler.submit(request("a", range(8), prefill_only=True), 0.0)
    step(scheduler)
    scheduler.reservations.reserve(request("b", range(20)), 0.0)
    with pytest.raises(InvalidRequest, match="a multiple of 4 from 0 to 19"):
        scheduler.reservations.prefill_here("b", (), 0.0, received_tokens=received)
    scheduler.reservations.prefill_here("b", (), 0.0, received_tokens=12)


def test_a_prompt_whose_logprobs_are_wanted_is_not_split() -> None:
    scheduler = make()
    scheduler.reservations.reserve(request("a", 20, sampling=SCORING), 0.0)
    with pytest.raises(InvalidRequest, match="logprobs are wanted cannot be split"):
        scheduler.reservations.prefill_here("a", (), 0.0, received_tokens=12)
    scheduler.reservations.prefill_here("a", (), 0.0)
    assert step(scheduler)[0] == {"a": 16}


def test_a_split_request_that_is_preempted_computes_all_of_its_tokens() -> None:
    scheduler = make(num_blocks=10, prefix_cache=False)
    scheduler.submit(request("a", 15), 0.0)
    step(scheduler)
    scheduler.reservations.reserve(request("b", 18), 0.0)
    scheduler.reservations.prefill_here("b", (), 0.0, received_tokens=12)
    while not scheduler.load().preemptions:
        step(scheduler)
    scheduler.abort("a")
    computed = step(scheduler)[0]["b"] + step(scheduler)[0]["b"]
    assert computed > 18


def test_blocks_whose_window_was_not_received_serve_only_sequences_that_go_on_after_it() -> None:
    """Layers with a window of 5 tokens have KV from 4 tokens before the part's end on."""
    scheduler = make(window=5)
    reservation = scheduler.reservations.reserve(request("a", range(30)), 0.0)
    assert reservation.resume_at == 25
    scheduler.reservations.prefill_here("a", (), 0.0, received_tokens=16)
    # The windows of token 16 on are here, those of token 12 on are not.
    assert scheduler.reservations.reserve(request("b", range(14)), 0.0).cached_tokens == 0
    assert scheduler.reservations.reserve(request("c", range(18)), 0.0).cached_tokens == 16
