"""Steps with draft tokens: the same tokens as without, whatever is drafted, and no block is lost."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.core.types import FinishReason, TokenOutput
from baton.engine.events import DraftsChecked
from baton.engine.request import EngineLimits, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.speculation.depth import Draft
from baton.engine.speculation.speculating import Speculating
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.hashed_model import HashedModel
from tests.unit.engine.scheduling import BLOCK_SIZE, Meter, finish, request
from tests.unit.engine.speculating import EOS, NUM_TOKENS, Told, World, any_request, expected_output, run_in_any_order
from tests.unit.engine.speculation.request import teach_waits


@pytest.mark.parametrize("seed", range(120))
def test_any_drafts_give_the_tokens_of_decoding(seed: int) -> None:
    chosen = Random(seed)
    model = HashedModel(BLOCK_SIZE, num_tokens=NUM_TOKENS)
    silent = chosen.random() * 0.95
    told = Told(model, most=chosen.randrange(1, 9), wrong=0.1 + chosen.random() / 2, silent=silent)
    world = World(told, model, num_blocks=chosen.choice((14, 26, 60)), state_slots=chosen.choice((0, 0, 9, 24)))
    shared = [chosen.randrange(NUM_TOKENS) for _ in range(12)]
    requests = [any_request(number, chosen, shared=shared) for number in range(14)]
    aborted = run_in_any_order(world, requests, chosen)
    world.run_all()
    for one in requests:
        output = world.sequences[one.request_id][len(one.prompt) :]
        expected = expected_output(model, one)[: world.scheduler.max_context_tokens - len(one.prompt)]
        assert output == (expected[: len(output)] if one.request_id in aborted else expected)
    if silent < 0.5:
        assert 0 < world.accepted < world.drafted
    assert not told.live
    assert sorted(told.finished) == sorted(one.request_id for one in requests)
    assert world.scheduler.leaked_blocks(lambda _: True) == 0
    assert world.scheduler.load().blocks_free == world.scheduler.load().blocks_total
    assert world.state_slots_left == world.state_slots


@pytest.mark.parametrize("seed", range(60))
def test_what_a_node_drafts_gives_the_tokens_of_decoding(seed: int) -> None:
    """With few seats and many, pools of ranks, recurrent states, tenants, and drops of their KV."""
    chosen = Random(seed)
    model = HashedModel(BLOCK_SIZE, num_tokens=NUM_TOKENS)
    speculator = Speculator(always=True)
    seats, num_blocks = chosen.choice((1, 2, 6, 12)), chosen.choice((16, 20, 60))
    owners = chosen.choice((1, 2))
    state_slots = chosen.choice((0, 7, 30)) if owners == 1 else 0
    world = World(
        speculator,
        model,
        num_blocks=num_blocks,
        requests=seats,
        owners=owners,
        state_slots=state_slots,
    )
    shared = [chosen.randrange(NUM_TOKENS) for _ in range(12)]
    requests = [
        replace(any_request(number, chosen, shared=shared), cache_salt="ab"[number % 2]) for number in range(20)
    ]
    drop = partial(world.scheduler.drop_roots, frozenset([world.scheduler.root("a", None)]))
    run_in_any_order(world, requests, chosen, disturb=drop)
    for one in requests:
        expected = expected_output(model, one)[: world.scheduler.max_context_tokens - len(one.prompt)]
        assert world.sequences[one.request_id][len(one.prompt) :] == expected
    assert len(speculator.proposer) == 0
    assert world.scheduler.leaked_blocks(lambda _: True) == 0
    assert world.scheduler.load().blocks_free == world.scheduler.load().blocks_total
    assert world.state_slots_left == world.state_slots


def test_accepted_drafts_need_fewer_steps() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    steps = {}
    for speculates in (False, True):
        told = Told(model, most=4, wrong=0.0, silent=0.0) if speculates else None
        world = World(told, model)
        sampling = ResolvedSampling(max_tokens=41, temperature=0.0, ignore_eos=True)
        world.submit(request("a-3", [1, 2, 3], sampling=sampling))
        world.run_all()
        assert world.ended == {"a-3": FinishReason.LENGTH}
        steps[speculates] = len(world.events)
    assert steps[False] == 41
    assert steps[True] == 1 + 40 // 5


def test_a_step_tells_what_was_drafted_and_kept() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=3, wrong=0.0, silent=0.0)
    world = World(told, model)
    sampling = ResolvedSampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    world.submit(request("a-2", [1, 2], sampling=sampling))
    world.run_all()
    assert [events.drafts for events in world.events] == [
        (),
        (DraftsChecked("a-2", 3, 3),),
        (DraftsChecked("a-2", 3, 3),),
    ]
    assert [len(events.tokens) for events in world.events] == [1, 4, 4]


def test_nothing_is_drafted_beyond_the_last_token() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    world = World(Told(model, most=8, wrong=0.0, silent=0.0), model)
    world.submit(request("a-2", [1, 2], sampling=ResolvedSampling(max_tokens=4, temperature=0.0, ignore_eos=True)))
    world.run_all()
    assert [events.drafts for events in world.events] == [(), (DraftsChecked("a-2", 2, 2),)]
    assert world.sequences["a-2"] == [1, 2, *model.continued([1, 2], 4)]


def test_a_row_with_drafts_that_fails_frees_its_blocks() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=5, wrong=0.0, silent=0.0)
    world = World(told, model)
    world.submit(request("a-2", [1, 2]))
    world.launch()
    world.end_step()
    batch = world.scheduler.schedule(0.0)
    assert batch is not None
    assert batch.rows[0].num_drafts == 5
    events = world.scheduler.complete([InternalError("broken")], 0.0)
    assert [failed.request_id for failed in events.failed] == ["a-2"]
    assert not told.live
    assert world.scheduler.load().blocks_free == world.scheduler.load().blocks_total


def test_a_step_with_drafts_counts_each_draft_token_as_a_row_that_reads_its_context() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    told = Told(model, most=5, wrong=0.0, silent=0.0)
    limits = EngineLimits(max_batch_tokens=24, max_batch_requests=8, max_waiting=99, prefix_cache=True)
    facts = ModelFacts(40, BLOCK_SIZE, 1000, 100, (EOS,), "m")
    meter = Meter(StepCosts(((1, 0.01),)))
    scheduler = Scheduler(limits, facts, meter, speculator=told)
    scheduler.submit(request("a-2", [1, 2]), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    finish(scheduler, batch, model.continued([1, 2], 1)[0])
    batch = scheduler.schedule(0.0)
    assert batch is not None
    scheduler.complete([tuple(TokenOutput(token, 1 + n) for n, token in enumerate([5]))], 0.0)
    assert meter.observed[-1][0] == StepWork(decode_rows=6, keys=3 + 4 + 5 + 6 + 7 + 8)


def test_a_drop_of_a_tenants_kv_reaches_the_drafts() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    dropped: list[frozenset[bytes]] = []

    class Dropping(Told):
        def drop_roots(self, roots: frozenset[bytes]) -> None:
            dropped.append(roots)

    world = World(Dropping(model), model)
    roots = frozenset([world.scheduler.root("salt", None)])
    world.scheduler.drop_roots(roots)
    assert dropped == [roots]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_the_output_of_a_request_that_ran_when_its_tenants_kv_was_dropped_is_not_kept(steps: int) -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    speculator = Speculator(always=True)
    recent = speculator.proposer.recent
    world = World(speculator, model)
    sampling = ResolvedSampling(max_tokens=9, temperature=0.0, ignore_eos=True)
    world.submit(request("a-30", list(range(30)), sampling=sampling))  # a prompt of two steps
    for _ in range(steps):
        assert world.launch()
        world.end_step()
    assert world.launch()
    world.scheduler.drop_roots(frozenset([world.scheduler.root("", None)]))
    world.run_all()
    assert world.ended == {"a-30": FinishReason.LENGTH}
    assert not recent.roots
    world.submit(request("b-30", list(range(30)), sampling=sampling))
    world.run_all()
    assert recent.roots


def test_drafts_leave_a_row_for_a_request_that_waits() -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    world = World(Told(model, most=8, wrong=0.0, silent=0.0), model, requests=4)
    sampling = ResolvedSampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    world.submit(request("a-2", [1, 2], sampling=sampling))
    world.launch()
    world.end_step()
    for name in ("b-2", "c-2"):
        world.submit(request(name, [3, 4], sampling=sampling))
    for expected in ([("a-2", 2), ("b-2", 0)], [("a-2", 1), ("b-2", 0), ("c-2", 0)]):
        assert world.launch()
        (batch,) = world.batches
        assert sorted((row.request_id, row.num_drafts) for row in batch.rows) == expected
        world.end_step()


@pytest.mark.parametrize(("requests", "state_slots"), [(1, 0), (8, 3)])
def test_no_step_waits_for_tokens_where_there_is_no_room_for_a_draft_token(requests: int, state_slots: int) -> None:
    """Neither a row, nor a slot for a state."""
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    world = World(Told(model, wrong=0.0, silent=0.0), model, requests=requests, state_slots=state_slots)
    world.submit(request("a-2", [1, 2], sampling=ResolvedSampling(max_tokens=9, temperature=0.0, ignore_eos=True)))
    assert world.launch()
    for _ in range(5):
        assert world.launch(), "the step in flight is waited for"
        world.end_step()
    assert not world.drafted


@pytest.mark.parametrize(("tokens", "fits"), [(6, True), (7, False)])
def test_steps_with_drafts_and_prompts_have_the_bound_of_their_decodes_without_drafts(tokens: int, fits: bool) -> None:
    """That is 30 ms, here three times the time of a decode, which 11 tokens take; five are of the row with drafts. The
    device waits for nothing."""
    asked: list[bool] = []

    class Asked(Told):
        def choose(self, *args: Any, prompts: bool = False, **given: Any) -> dict[str, Draft]:
            asked.append(prompts)
            return super().choose(*args, **given)

    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    costs = StepCosts(((1, 0.010), (2, 0.012), (24, 0.056)))
    told = Asked(model, most=4, wrong=0.0, silent=0.0)
    teach_waits(told, 1, 0.0, costs)
    world = World(told, model, meter=Meter(costs))
    sampling = ResolvedSampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    world.submit(replace(request("a-2", [1, 2], sampling=sampling), gap_factor=3.0))
    for _ in range(2):
        assert world.launch()
        world.end_step()
    assert not asked[-1]
    world.submit(request(f"b-{tokens}", list(range(tokens)), sampling=sampling))
    assert world.launch()
    (batch,) = world.batches
    assert asked[-1]
    assert (batch.rows[0].request_id, batch.rows[0].num_drafts) == ("a-2", 4)
    assert [len(row.token_ids) for row in batch.rows[1:]] == [tokens] * fits


@pytest.mark.parametrize("how", ["step", "everything", "abort"])
def test_a_step_with_drafts_that_ends_badly_keeps_no_slot_of_a_state(how: str) -> None:
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)
    world = World(Told(model, wrong=0.0, silent=0.0), model, requests=8, state_slots=24)
    sampling = ResolvedSampling(max_tokens=30, temperature=0.0, ignore_eos=True)
    for name in ("a-2", "b-2"):
        world.submit(request(name, [1, ord(name[0])], sampling=sampling))
    while not (world.in_flight and any(row.draft_slots for row in world.batches[-1].rows)):
        if not world.launch():
            world.end_step()
    if how == "step":
        world.scheduler.fail(InternalError("no memory"), 0.0)
    elif how == "everything":
        world.scheduler.fail_all(InternalError("no memory"))
    else:
        for name in ("a-2", "b-2"):
            world.scheduler.abort(name)
        assert world.state_slots_left < world.state_slots
        world.end_step()
    assert world.state_slots_left == world.state_slots


@pytest.mark.parametrize("tokens_before", range(1, 6))
def test_decodes_after_rejected_drafts_have_a_block_for_each_token(tokens_before: int) -> None:
    """Blocks that were taken for drafts stay, so more blocks are held than the rows of decodes have."""
    model = HashedModel(BLOCK_SIZE, num_tokens=1000)

    class Once(Told):
        has_drafted = False

        def pays(self, *args: object, **given: object) -> bool:
            return not self.has_drafted

        def choose(self, requests: Sequence[Speculating], *args: object, **given: object) -> dict[str, Draft]:
            has_drafted, self.has_drafted = self.has_drafted, True
            return {} if has_drafted else {each.request_id: (0,) * 7 for each in requests}

    world = World(Once(model), model, requests=8)
    sampling = ResolvedSampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    prompt = list(range(tokens_before))
    world.submit(request(f"a-{tokens_before}", prompt, sampling=sampling))
    world.run_all()
    assert world.sequences[f"a-{tokens_before}"] == [*prompt, *model.continued(prompt, 40)]
