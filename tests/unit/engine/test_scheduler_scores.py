"""The logprobs of a prompt are collected over its chunks, and reported once, with the first token."""

from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob
from baton.engine.events import PromptScored
from tests.unit.engine.scheduling import finish, launch, make, request, step

SCORING = ResolvedSampling(max_tokens=50, temperature=0.0, prompt_logprobs=2)


def scored(name: str, prompt: tuple[int, ...]) -> PromptScored:
    rest = (PromptLogprob(token_id, -float(place)) for place, token_id in enumerate(prompt[1:], start=1))
    return PromptScored(name, (PromptLogprob(prompt[0], None), *rest))


def test_every_chunk_asks_for_the_tokens_that_follow_its_own() -> None:
    scheduler = make(tokens=4)
    prompt = tuple(range(10, 19))
    scheduler.submit(request("a", prompt, sampling=SCORING), 0.0)
    asked, reports = [], []
    for _ in range(4):
        batch = launch(scheduler)
        asked += [(place, list(score.targets), score.alternatives) for place, score in batch.scores]
        reports.append(finish(scheduler, batch).scored)
    assert asked == [(0, [11, 12, 13, 14], 2), (0, [15, 16, 17, 18], 2), (0, [], 2)]
    assert reports == [(), (), (scored("a", prompt),), ()]


def test_places_are_those_of_the_rows_in_the_step() -> None:
    scheduler = make()
    scheduler.submit(request("plain", 3), 0.0)
    step(scheduler)
    scheduler.submit(request("a", (1, 2, 3), sampling=SCORING), 0.0)
    scheduler.submit(request("b", (4,), sampling=SCORING), 0.0)
    batch = launch(scheduler)
    assert [(batch.rows[place].request_id, list(score.targets)) for place, score in batch.scores] == [
        ("b", []),
        ("a", [2, 3]),
    ]
    assert finish(scheduler, batch).scored == (scored("b", (4,)), scored("a", (1, 2, 3)))


def test_no_cached_prefix_is_used_and_the_prompt_is_cached_for_others() -> None:
    scheduler = make(tokens=64)
    for name, sampling, computed in (("a", None, 10), ("b", SCORING, 10), ("c", None, 2)):
        scheduler.submit(request(name, range(10), sampling=sampling, prefill_only=True), 0.0)
        assert step(scheduler)[0] == {name: computed}
        scheduler.abort(name)


def test_a_prompt_that_is_preempted_half_way_reports_each_token_once() -> None:
    scheduler = make(num_blocks=8, tokens=2)
    prompt = tuple(range(10, 33))
    scheduler.submit(request("decodes", 3), 0.0)
    step(scheduler)
    scheduler.submit(request("a", prompt, sampling=SCORING), 0.0)
    while not scheduler.load().preemptions:  # the decode takes the free block, then needs another
        step(scheduler)
        assert scheduler.load().tokens_waiting > 0, "the prompt must not be complete"
    scheduler.abort("decodes")
    first = launch(scheduler)
    assert first.rows[0].token_start > 0, "blocks with known logprobs are reused"
    reports = list(finish(scheduler, first).scored)
    while not reports:
        reports += step(scheduler)[1].scored
    assert reports == [scored("a", prompt)]
    assert step(scheduler)[1].scored == ()


def test_a_request_that_decodes_is_recomputed_without_them() -> None:
    scheduler = make(num_blocks=5, prefix_cache=False)
    scheduler.submit(request("a", 7), 0.0)
    scheduler.submit(request("b", 6, sampling=SCORING), 0.0)
    step(scheduler)
    while not scheduler.load().preemptions:
        step(scheduler)
    scheduler.abort("a")
    assert not launch(scheduler).scores


def test_a_reserved_prompt_with_cached_blocks_is_computed_here_in_others() -> None:
    scheduler = make(tokens=64)
    scheduler.submit(request("plain", range(10), prefill_only=True), 0.0)
    step(scheduler)
    reservation = scheduler.reservations.reserve(request("a", range(10), sampling=SCORING), 0.0)
    assert reservation.cached_tokens == 8
    scheduler.reservations.prefill_here("a", (), 0.0)
    batch = launch(scheduler)
    (row,) = batch.rows
    assert (row.token_start, row.token_stop) == (0, 10)
    assert not set(row.block_ids) & set(reservation.block_ids[:2])
    assert finish(scheduler, batch).scored == (scored("a", tuple(range(10))),)


def test_an_aborted_or_failed_prompt_reports_nothing() -> None:
    scheduler = make()
    scheduler.submit(request("a", 6, sampling=SCORING), 0.0)
    batch = launch(scheduler)
    scheduler.abort("a")
    assert finish(scheduler, batch).scored == ()
