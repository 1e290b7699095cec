"""Aligned chunks: how a prompt is cut depends on the prompt alone."""

import pytest

from baton.core.errors import ConfigError
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from tests.unit.engine.limits import limits
from tests.unit.engine.scheduling import finish, launch, make, request, step


def cuts(*, others: int, tokens: int) -> list[tuple[int, int]]:
    """Chunks of a prompt of 21 tokens, next to some decodes and an earlier prompt."""
    scheduler = make(tokens=tokens, requests=4, align=8)
    for index in range(others):
        scheduler.submit(request(f"{index}", 1), 0.0)
    if others:
        step(scheduler)
    scheduler.submit(request("p", 11, prefill_only=True), 0.0)
    scheduler.submit(request("a", 21), 0.0)
    chunks: list[tuple[int, int]] = []
    while not any(stop == 21 for _, stop in chunks):
        events = step(scheduler)[1]
        chunks += [(chunk.token_start, chunk.token_stop) for chunk in events.chunks if chunk.request_id == "a"]
    return chunks


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("tokens", [11, 13, 16, 100])
def test_a_prompt_is_cut_at_every_multiple_next_to_any_other_requests(others: int, tokens: int) -> None:
    assert cuts(others=others, tokens=tokens) == [(0, 8), (8, 16), (16, 21)]


def test_a_chunk_that_the_budget_does_not_hold_waits_for_the_next_step() -> None:
    scheduler = make(tokens=15, requests=4, align=8)
    for name in "ab":
        scheduler.submit(request(name, 10), 0.0)
    assert step(scheduler)[0] == {"a": 8}
    assert scheduler.load().requests_waiting == 1
    assert step(scheduler)[0] == {"a": 2, "b": 8}


def test_the_end_of_a_prompt_fits_where_a_whole_chunk_does_not() -> None:
    scheduler = make(tokens=15, requests=4, align=8)
    scheduler.submit(request("a", 8), 0.0)
    scheduler.submit(request("b", 7), 0.0)
    assert step(scheduler)[0] == {"a": 8, "b": 7}


def test_a_prefix_is_reused_up_to_a_multiple_of_chunk_and_block() -> None:
    scheduler = make(tokens=32, requests=4, align=6)
    scheduler.submit(request("a", range(29), prefill_only=True), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
    assert scheduler.reserve(request("b", range(29)), 0.0).cached_tokens == 24
    assert scheduler.reserve(request("c", range(23)), 0.0).cached_tokens == 12
    scheduler.abort("b")
    scheduler.abort("c")
    scheduler.submit(request("d", range(29)), 0.0)
    computed, events = step(scheduler)
    assert (computed, events.started[0].cached_tokens) == ({"d": 5}, 24)


def test_a_reserved_prompt_that_is_computed_here_is_cut_like_a_submitted_one() -> None:
    scheduler = make(tokens=16, requests=4, align=8)
    scheduler.reserve(request("a", 19), 0.0)
    scheduler.prefill_here("a", (), 0.0)
    assert [step(scheduler)[0] for _ in range(4)] == [{"a": 8}, {"a": 8}, {"a": 3}, {"a": 1}]


@pytest.mark.parametrize(("align", "sizes"), [(8, [8, 8, 3, 3, 1]), (None, [16, 6, 1])])
def test_known_tokens_of_the_output_are_computed_apart_from_the_prompt_where_their_bits_count(
    align: int | None, sizes: list[int]
) -> None:
    scheduler = make(tokens=16, requests=4, align=align)
    scheduler.reserve(request("a", 19), 0.0)
    scheduler.prefill_here("a", (1, 2, 3), 0.0)
    steps = [step(scheduler) for _ in sizes]
    assert [computed["a"] for computed, _ in steps] == sizes
    # The step that computes the last known token draws the next one, and no step before it draws any.
    assert [len(events.tokens) for _, events in steps] == [0] * (len(sizes) - 2) + [1, 1]


def test_known_tokens_of_the_output_are_computed_as_decodes_in_as_many_rows_as_are_free() -> None:
    scheduler = make(tokens=16, requests=4, align=8)
    scheduler.reserve(request("d", 3), 0.0)
    scheduler.admit("d", TokenOutput(5, 0))
    scheduler.reserve(request("a", 8), 0.0)
    scheduler.prefill_here("a", (1, 2, 3, 4, 5), 0.0)
    shapes, draws = [], []
    for _ in range(4):
        batch = launch(scheduler)
        if batch.rows[-1].unfolds:
            assert scheduler.schedule(0.0) is None  # the next step needs the tokens of this one
        shapes.append([(row.request_id, len(row.token_ids), row.as_decodes) for row in batch.rows])
        draws.append([sampled.request_id for sampled in finish(scheduler, batch).tokens])
    assert shapes == [
        [("d", 1, False), ("a", 8, False)],
        [("d", 1, False), ("a", 3, True)],
        [("d", 1, False), ("a", 2, True)],
        [("d", 1, False), ("a", 1, False)],
    ]
    assert draws == [["d"], ["d"], ["d", "a"], ["d", "a"]]


def test_steps_that_compute_known_tokens_of_several_outputs_have_no_more_rows_than_seats() -> None:
    scheduler = make(tokens=32, requests=6, align=8)
    for name in "abc":
        scheduler.reserve(request(name, 8), 0.0)
        scheduler.prefill_here(name, (1, 2, 3, 4, 5, 6, 7), 0.0)
    rows: dict[str, int] = {}
    while scheduler.load().tokens_waiting:
        batch = launch(scheduler)
        computed = [row for row in batch.rows if row.token_start >= 8]
        for row in computed:
            rows[row.request_id] = rows.get(row.request_id, 0) + len(row.token_ids)
        assert sum(len(row.token_ids) for row in computed) + len(batch.rows) - len(computed) <= 6
        assert len(batch.rows) == 3, "each running request gets further with each step"
        finish(scheduler, batch)
    assert min(rows.values()) >= 7


def test_with_recurrent_states_too_known_tokens_of_the_output_are_computed_together() -> None:
    scheduler = make(tokens=16, requests=4, align=8, state_slots=4, scan_tokens=8)
    scheduler.reserve(request("a", 19), 0.0)
    scheduler.prefill_here("a", (1, 2, 3), 0.0)
    assert [step(scheduler)[0]["a"] for _ in range(5)] == [8, 8, 3, 3, 1]


def test_a_request_that_continues_reuses_only_the_prompt_of_an_equal_prefix() -> None:
    scheduler = make(tokens=32, requests=4, align=8)
    scheduler.submit(request("a", range(29), prefill_only=True), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
    scheduler.reserve(request("b", range(17)), 0.0)
    scheduler.prefill_here("b", tuple(range(17, 29)), 0.0)
    assert step(scheduler)[0] == {"b": 1}  # 16 are cached


def test_aligned_chunks_follow_each_other_ahead() -> None:
    scheduler = make(tokens=12, requests=4, align=8)
    scheduler.reserve(request("d", 3), 0.0)
    scheduler.admit("d", TokenOutput(5, 0))
    scheduler.submit(request("a", 20), 0.0)
    first, second = launch(scheduler), launch(scheduler)
    finish(scheduler, first)
    third = launch(scheduler)
    rows = [row for batch in (first, second, third) for row in batch.rows if row.request_id == "a"]
    assert [(row.token_start, row.token_stop) for row in rows] == [(0, 8), (8, 16), (16, 20)]


def test_a_whole_chunk_fits_next_to_all_decodes() -> None:
    limits(max_batch_tokens=11, max_batch_requests=4, chunk_align_tokens=8)
    with pytest.raises(ConfigError, match="leaves no room for a chunk of 8 tokens") as refused:
        limits(max_batch_tokens=10, max_batch_requests=4, chunk_align_tokens=8)
    assert (refused.value.field, refused.value.value) == ("max_batch_tokens", "10")
    assert refused.value.allowed == ("an integer of at least 11",)
    assert refused.value.cure


def test_a_chunk_has_at_least_one_token() -> None:
    with pytest.raises(ConfigError, match="chunk_align_tokens is 0") as refused:
        limits(chunk_align_tokens=0)
    assert refused.value.field == "chunk_align_tokens"


@pytest.mark.parametrize(("align", "cached_tokens"), [(8, 8), (None, 20)])
def test_decoded_tokens_are_no_ones_prefix_where_their_bits_count(align: int | None, cached_tokens: int) -> None:
    scheduler = make(tokens=16, requests=4, align=align)
    scheduler.submit(request("a", range(9), sampling=ResolvedSampling(max_tokens=12, temperature=0.0)), 0.0)
    while scheduler.load().requests_running + scheduler.load().requests_waiting:
        step(scheduler)
    # Tokens 0 to 8 are the prompt; 5 is what every step draws.
    assert scheduler.reserve(request("b", [*range(9), *[5] * 12]), 0.0).cached_tokens == cached_tokens
