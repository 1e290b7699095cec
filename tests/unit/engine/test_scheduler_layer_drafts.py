"""Steps after which the model's own layer drafts: the same tokens as without, and drafts for other nodes."""

from random import Random
from typing import Any

import pytest

from baton.core.costs import StepCosts
from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, LayerDrafts
from baton.engine.request import EngineLimits, ModelFacts
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.speculation.layer_drafting import RETRY_STEPS
from baton.engine.speculation.speculator import Speculator
from tests.unit.engine.hashed_model import HashedModel
from tests.unit.engine.scheduling import BLOCK_SIZE, VOCAB_SIZE, Meter, request
from tests.unit.engine.speculating import NUM_TOKENS, World, any_request, expected_output, run_in_any_order

COSTS = StepCosts(((1, 0.010), (64, 0.010), (512, 0.050)))
SAMPLING = ResolvedSampling(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("seed", range(40))
def test_any_drafts_give_the_tokens_of_decoding(seed: int) -> None:
    chosen = Random(seed)
    model = HashedModel(BLOCK_SIZE, num_tokens=NUM_TOKENS)
    speculator = Speculator(always=True)
    seats, num_blocks = chosen.choice((1, 2, 6, 12)), chosen.choice((16, 20, 60))
    errors = chosen.choice((0.0, 0.3, 1.0))
    world = World(speculator, model, num_blocks=num_blocks, requests=seats, layer_errors=errors)
    shared = [chosen.randrange(NUM_TOKENS) for _ in range(12)]
    requests = [any_request(number, chosen, shared=shared) for number in range(16)]
    aborted = run_in_any_order(world, requests, chosen)
    for one in requests:
        output = world.sequences[one.request_id][len(one.prompt) :]
        expected = expected_output(model, one)
        assert output == (expected[: len(output)] if one.request_id in aborted else expected)
    assert len(speculator.proposer) == 0
    assert world.scheduler.leaked_blocks(lambda _: True) == 0


def test_accepted_drafts_take_a_fraction_of_the_steps() -> None:
    model, steps = HashedModel(BLOCK_SIZE, num_tokens=NUM_TOKENS), []
    for errors in (None, 0.0):
        world = World(None if errors is None else Speculator(always=True), model, num_blocks=60, layer_errors=errors)
        world.submit(
            request("r-3", [1, 2, 3], sampling=ResolvedSampling(max_tokens=40, temperature=0, ignore_eos=True))
        )
        world.run_all()
        steps.append(len(world.events))
    assert steps[1] < 0.6 * steps[0]


def scheduler(speculator: Speculator | None = None) -> Scheduler:
    limits = EngineLimits(max_batch_tokens=16, max_batch_requests=8, max_waiting=8, prefix_cache=True)
    facts = ModelFacts(
        num_blocks=32,
        block_size=BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        max_context_tokens=100,
        eos_token_ids=(),
        identity="m",
        drafts=True,
    )
    return Scheduler(limits, facts, Meter(None), speculator=speculator or Speculator(always=True))


class Asked(Speculator):
    """Keeps whether prompts share each step that asks, and whether they want to share the next one."""

    def __init__(self) -> None:
        super().__init__(always=True)
        self.prompts: list[tuple[bool, bool]] = []

    def count_layer_drafts(self, *args: Any, **given: Any) -> int:
        self.prompts.append((given["prompts"], given["prompts_next"]))
        return super().count_layer_drafts(*args, **given)


def test_prompts_that_wait_for_the_next_step_are_known_when_the_layer_is_asked() -> None:
    asked = Asked()
    node = scheduler(asked)
    node.submit(request("a", 6, sampling=SAMPLING), 0.0)
    for more in (None, request("b", 20, sampling=SAMPLING), None):
        if more is not None:
            node.submit(more, 0.0)
        batch = node.schedule(0.0)
        assert batch is not None
        results = [
            None if row.sample is None else tuple(TokenOutput(5, row.sample.output_index) for _ in range(1))
            if row.num_drafts else TokenOutput(5, row.sample.output_index)
            for row in batch.rows
        ]  # fmt: skip
        node.complete(results, 0.0, layer_drafts=LayerDrafts({}, 0, 0.0))
    assert asked.prompts == [(True, False), (True, True), (True, False)]


def test_drafts_after_a_prompt_for_another_node_come_as_an_event_and_delay_no_step() -> None:
    node = scheduler()
    node.submit(request("a", 6, sampling=SAMPLING, prefill_only=True), 0.0)
    node.submit(request("b", 20, sampling=SAMPLING, prefill_only=True), 0.0)
    first = node.schedule(0.0)
    assert first is not None
    assert first.num_layer_drafts == 2
    second = node.schedule(0.0)
    assert second is not None, "the next chunk of b does not wait"
    events = node.complete([TokenOutput(5, 0), None], 0.0, layer_drafts=LayerDrafts({0: (7, 8)}, 1, 0.001))
    assert [(each.request_id, each.tokens) for each in events.drafted] == [("a", (7, 8))]


@pytest.mark.parametrize(
    ("sent", "drafts"), [((7, 8), [7, 8]), ((), []), ((7, VOCAB_SIZE), []), ((7, 2**32 - 1), []), ((-1,), [])]
)
def test_the_first_step_after_a_hand_over_takes_drafts_that_can_be_tokens(
    sent: tuple[int, ...], drafts: list[int]
) -> None:
    node = scheduler()
    node.reservations.reserve(request("a", 6, sampling=SAMPLING), 0.0)
    node.reservations.admit("a", TokenOutput(5, 0), sent)
    batch = node.schedule(0.0)
    assert batch is not None
    (row,) = batch.rows
    assert list(row.drafts) == drafts
    assert list(row.token_ids[:1]) == [5]


def test_at_saturation_decodes_are_computed_without_the_layer_and_prompts_with_it() -> None:
    """A node whose seats are all taken is saturated."""
    model = HashedModel(BLOCK_SIZE, num_tokens=NUM_TOKENS)
    world = World(Speculator(), model, num_blocks=90, requests=3, layer_errors=0.0, meter=Meter(COSTS))
    sampling = ResolvedSampling(max_tokens=85, temperature=0.0, ignore_eos=True)

    def run(*names: str, count: int = 1000) -> list[Batch]:
        for name in names:
            world.submit(request(name, [1, 2, 3], sampling=sampling))
        steps: list[Batch] = []
        while len(steps) < count and (world.launch() or world.in_flight):
            if world.batches[-1] is not (steps[-1] if steps else None):
                steps.append(world.batches[-1])
            world.end_step()
        return steps

    first = run("a-3", "b-3", "d-3", count=RETRY_STEPS + 3)
    assert [step.writes_draft_kv for step in first] == [True] * (RETRY_STEPS - 1) + [False] * 4
    world.scheduler.abort("b-3")
    second = run("e-3", count=3)
    assert [step.writes_draft_kv for step in second] == [True, False, False], "the prompt of e, and two decodes"
    assert not any(state.is_shared for state in world.scheduler._roster.running), "their blocks lack the layer's KV"
    assert not any(step.num_layer_drafts for step in (*first, *second))
    for name in ("d-3", "e-3"):
        world.scheduler.abort(name)
    rest = run("c-3")
    assert any(step.num_layer_drafts for step in rest)
    drafted = {row.request_id for step in rest for row in step.rows if row.num_drafts}
    assert drafted == {"c-3"}, "the other one has decoded without the layer"
    for name in ("a-3", "c-3"):
        assert world.sequences[name] == [1, 2, 3, *model.continued([1, 2, 3], 85)]


def test_chunks_say_which_token_follows_them() -> None:
    node = scheduler()
    prompt = list(range(100, 120))
    node.submit(request("a", prompt, sampling=SAMPLING), 0.0)
    first, second = node.schedule(0.0), node.schedule(0.0)
    assert first is not None
    assert second is not None
    assert first.rows[0].next_token == prompt[16]
    assert second.rows[0].next_token == -1, "the step draws it"
    assert (first.num_layer_drafts, second.num_layer_drafts) == (0, 4)
    assert node.schedule(0.0) is None, "the next step waits for the drafts"


@pytest.mark.parametrize("part_tokens", [0, 8])
@pytest.mark.parametrize("has_draft", [True, False])
def test_the_layer_drafts_nothing_for_kv_that_came_without_its_own_and_such_kv_is_kept_for_nobody(
    part_tokens: int, has_draft: bool
) -> None:
    """Of a whole prompt, and of the first part of one whose rest is computed here."""
    node, prompt = scheduler(), list(range(100, 112))
    node.reservations.reserve(request("a", prompt, sampling=SAMPLING), 0.0, arriving_tokens=part_tokens)
    if part_tokens:
        node.reservations.prefill_here("a", (), 0.0, received_tokens=part_tokens, has_draft=has_draft)
    else:
        node.reservations.admit("a", TokenOutput(5, 0), (7, 8), has_draft=has_draft)
    step = node.schedule(0.0)
    assert step is not None
    (row,) = step.rows
    assert bool(step.num_layer_drafts) is has_draft
    assert (list(row.drafts) == [7, 8]) is (has_draft and not part_tokens)
    assert step.writes_draft_kv is (has_draft or part_tokens > 0), "a chunk is computed with the layer"
    layer_drafts = LayerDrafts({0: (9,) * step.num_layer_drafts}, 1, 0.001) if has_draft else None
    drawn = TokenOutput(6, 0 if part_tokens else 1)
    node.complete([(drawn,) if row.num_drafts else drawn], 0.0, layer_drafts=layer_drafts)
    node.abort("a")
    kept = node.reservations.reserve(request("b", prompt, sampling=SAMPLING), 0.0).cached_tokens
    assert (kept > 0) is has_draft
