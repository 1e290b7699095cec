"""How a step's prompt tokens are spread over ranks with attention data parallelism: a step takes as long as its busiest
rank."""

import random
from collections import Counter
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.costs import StepCosts
from baton.engine.batch import Batch
from baton.engine.scheduling.rank_shares import RankShares, water_level
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import finish, launch, make, request, step

# Room for all prompts of these tests.
BLOCKS = 400


def level(**options: Any) -> Scheduler:
    return make(**{"owners": 2, "num_blocks": BLOCKS, "tokens": 16, "context": 1000, "waiting": 99, **options})


def tokens_by_rank(batch: Batch, ranks: int) -> list[int]:
    counts: Counter[int] = Counter()
    for row in batch.rows:
        counts[row.owner] += len(row.token_ids)
    return [counts[rank] for rank in range(ranks)]


def test_prompts_of_two_ranks_share_a_step() -> None:
    scheduler = level()
    for name in "ab":
        scheduler.submit(request(name, 20), 0.0)
    assert [step(scheduler)[0] for _ in range(3)] == [{"a": 8, "b": 8}, {"a": 8, "b": 8}, {"a": 4, "b": 4}]


def test_a_rank_leaves_what_its_prompts_do_not_need_to_the_others() -> None:
    scheduler = level(owners=4)
    for name, tokens in (("a", 30), ("b", 1), ("c", 3), ("d", 30)):
        scheduler.submit(request(name, tokens), 0.0)
    assert step(scheduler)[0] == {"a": 6, "b": 1, "c": 3, "d": 6}


def test_a_rank_alone_with_prompts_gets_the_whole_step() -> None:
    scheduler = level(owners=4)
    scheduler.submit(request("a", 40), 0.0)
    assert step(scheduler)[0] == {"a": 16}


def test_a_ranks_decodes_count_as_its_tokens() -> None:
    scheduler = level(requests=12, prefix_cache=False)
    for name in "abcd":
        scheduler.submit(request(name, 4), 0.0)
    step(scheduler)
    for name in ("b", "d"):
        scheduler.abort(name)  # both of rank 1
    for name in "ef":
        scheduler.submit(request(name, 30), 0.0)
    batch = launch(scheduler)
    assert tokens_by_rank(batch, 2) == [8, 8]
    assert sorted(len(row.token_ids) for row in batch.rows) == [1, 1, 6, 8]


def test_waiting_prompts_of_one_rank_fill_the_step() -> None:
    """Both go where their prefix is."""
    scheduler = level(owners=8, tokens=64)
    scheduler.submit(request("first", (prefix := tuple(range(200)))), 0.0)
    for _ in range(4):
        step(scheduler)
    scheduler.abort("first")
    for name in "ab":
        scheduler.submit(request(name, (*prefix, *[ord(name)] * 40)), 0.0)
    batch = launch(scheduler)
    assert tokens_by_rank(batch, 8) == [64, 0, 0, 0, 0, 0, 0, 0]
    assert [len(row.token_ids) for row in batch.rows] == [40, 24]


def test_a_prompt_of_less_priority_gets_what_is_left() -> None:
    scheduler = level()
    scheduler.submit(request("a", 20), 0.0)
    scheduler.submit(request("b", 20, priority=1), 0.0)
    assert [step(scheduler)[0] for _ in range(3)] == [{"a": 16}, {"a": 4, "b": 12}, {"a": 1, "b": 8}]


def test_earlier_deadlines_on_other_ranks_do_not_hold_a_rank_back() -> None:
    scheduler = level(requests=40)
    scheduler.submit(request("long", 96), 0.0)
    assert step(scheduler)[0] == {"long": 16}
    computed = 0
    for number in range(10):
        for other in range(8):
            scheduler.submit(request(f"{other}.{number}", 4, due_s=5.0, prefill_only=True), 0.0)
        batch = launch(scheduler)
        for sampled in finish(scheduler, batch).tokens:
            scheduler.abort(sampled.request_id)
        assert tokens_by_rank(batch, 2) == [8, 8]
        computed += sum(len(row.token_ids) for row in batch.rows if row.request_id == "long")
    assert computed == 80


def test_a_step_that_also_decodes_is_shared_within_its_bound() -> None:
    # 5 ms for up to 100 tokens, then 10 us for each: 7.5 ms for 350 tokens, 4 of them decodes.
    costs = StepCosts(((1, 0.005), (100, 0.005), (1100, 0.015)))
    scheduler = level(tokens=2000, costs=costs)
    for name in "abcd":
        scheduler.submit(request(name, 4), 0.0)
    step(scheduler)
    for name in "ef":
        scheduler.submit(request(name, 500), 0.0)
    assert tokens_by_rank(launch(scheduler), 2) == [175, 175]


class Padded(NamedTuple):
    """The tokens of steps, with those that pad each rank to the most of any rank, and the number of steps."""

    tokens: int = 0
    places: int = 0
    steps: int = 0


def padded(ranks: int, *, prefill_only: bool) -> Padded:
    """Of steps until random prompts are computed, a new one before every other step."""
    scheduler = level(owners=ranks, requests=16, num_blocks=1000, tokens=64, prefix_cache=False)
    drawn, seen, steps = random.Random(0), Padded(), 0
    while steps < 200 or scheduler._roster.everyone():
        if steps < 200 and steps % 2 == 0:
            tokens = drawn.choice((8, 30, 90, 300))
            scheduler.submit(request(f"{steps}", tokens, prefill_only=prefill_only, due_s=drawn.random()), 0.0)
        steps += 1
        if (batch := scheduler.schedule(0.0)) is None:
            continue
        counts = tokens_by_rank(batch, ranks)
        seen = Padded(seen.tokens + sum(counts), seen.places + ranks * max(counts), seen.steps + 1)
        for sampled in finish(scheduler, batch).tokens:
            if prefill_only:
                scheduler.abort(sampled.request_id)
    return seen


@pytest.mark.parametrize("prefill_only", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_levels_spare_padding_and_make_no_more_steps(
    ranks: int, prefill_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = padded(ranks, prefill_only=prefill_only)
    monkeypatch.setattr(RankShares, "room", lambda *_: 10**6)
    before = padded(ranks, prefill_only=prefill_only)
    assert ours.tokens == before.tokens
    assert ours.places - ours.tokens < 0.65 * (before.places - before.tokens)
    assert ours.steps <= 1.05 * before.steps


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 200))
def test_ranks_with_fewest_tokens_are_filled_first(tokens: list[int], added: int) -> None:
    level = water_level(tokens, added)
    room = [max(0, level - each) for each in tokens]
    assert added <= sum(room) < added + len(tokens)
