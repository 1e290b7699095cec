"""Where prompts of a model with recurrent states leave snapshots: within a chunk, which is not cut for them, or at its
end. Places are multiples of 8 tokens here."""

import pytest

from baton.engine.batch import Batch
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.scheduling import finish, launch, make, request

UNIT = 8
TEXT = tuple(range(100, 164))


def scheduler_of(*, tokens: int = 64, slots: int = 9, prefix_cache: bool = True) -> Scheduler:
    return make(tokens=tokens, state_slots=slots, scan_tokens=UNIT, prefix_cache=prefix_cache, num_blocks=64)


def places(batch: Batch) -> dict[str, tuple[list[int], bool]]:
    """Of each request, the tokens before the snapshots within its row, and whether there is one at the row's end."""
    copied = {source for source, _ in batch.copies}
    return {
        row.request_id: ([row.token_start + tokens for tokens, _ in row.snapshots], row.state_slot in copied)
        for row in batch.rows
    }


def computed(scheduler: Scheduler, name: str, prompt: tuple[int, ...] | int) -> dict[str, tuple[list[int], bool]]:
    """The snapshots of the first step with this request, after whose first token it is aborted."""
    scheduler.submit(request(name, prompt), 0.0)
    batch = launch(scheduler)
    finish(scheduler, batch)
    scheduler.abort(name)
    return places(batch)


@pytest.mark.parametrize(
    ("length", "within", "at_end"),
    [(1, [], False), (8, [], True), (9, [8], False), (16, [8], True), (17, [16], False), (50, [48], False)],
)
def test_a_prompt_leaves_a_snapshot_before_its_last_token_and_one_at_its_end(
    length: int, within: list[int], at_end: bool
) -> None:
    assert computed(scheduler_of(), "a", length) == {"a": (within, at_end)}


def test_a_prompt_that_departs_from_another_leaves_one_there_too() -> None:
    scheduler = scheduler_of()
    computed(scheduler, "a", (*TEXT[:30], *range(20)))
    assert computed(scheduler, "b", (*TEXT[:30], *range(40, 60))) == {"b": ([24, 48], False)}
    assert computed(scheduler, "c", (*TEXT[:30], 3, 4)) == {"c": ([], True)}, "begins after the first 24"


def test_a_prompt_that_comes_again_begins_at_the_snapshot_and_leaves_none() -> None:
    scheduler = scheduler_of()
    computed(scheduler, "a", TEXT[:21])
    scheduler.submit(request("b", TEXT[:21]), 0.0)
    batch = launch(scheduler)
    assert [(row.token_start, row.snapshots) for row in batch.rows] == [(16, ())]
    assert batch.copies == ()


def test_each_chunk_leaves_the_snapshots_of_its_own_tokens() -> None:
    scheduler, chunks = scheduler_of(tokens=20), []
    scheduler.submit(request("a", 31), 0.0)
    for _ in range(2):
        batch = launch(scheduler)
        finish(scheduler, batch)
        chunks.append(places(batch)["a"])
    assert chunks == [([], True), ([24], False)], "the first one ends at 16, where its end is a place for one"


def test_prompts_of_one_step_leave_snapshots_in_different_slots() -> None:
    scheduler = scheduler_of()
    for name in "abc":
        scheduler.submit(request(name, TEXT[:18]), 0.0)
    batch = launch(scheduler)
    slots = [slot for row in batch.rows for slot in (row.state_slot, *(slot for _, slot in row.snapshots))]
    assert len(slots) == len(set(slots)) == 6
    finish(scheduler, batch)
    states = scheduler._blocks.states.slots
    assert (states.num_held, states.num_available) == (3, 6), "one of three equal snapshots is kept"


@pytest.mark.parametrize(("slots", "within"), [(1, []), (2, [16])])
def test_a_snapshot_without_a_slot_is_left_out(slots: int, within: list[int]) -> None:
    assert computed(scheduler_of(slots=slots), "a", 18) == {"a": (within, False)}


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    assert computed(scheduler_of(prefix_cache=False), "a", 16) == {"a": ([], False)}
