"""What a profile measures of the steps that a node serves, and which step size it chooses for which role."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.engine.batch import Batch, RowResult
from baton.engine.build import BuiltRunner
from baton.engine.cache_size import gpu_seats
from baton.engine.calibration import calibrate, step_rule
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.runner import ModelRunner
from baton.engine.device.step_costs import (
    DECODE_RULE,
    PREFILL_RULE,
    STEP_TOKENS,
    ServedStep,
    StepRule,
    choose_step_tokens,
    measure_costs,
    served_steps,
    step_sizes,
)
from baton.engine.request import ModelFacts
from baton.settings.node_config import DecodeSettings, NodeSettings, PrefillSettings
from tests.unit.engine.tiny import build, greedy, prompt_of, request, running, transformers_greedy

FACTS = ModelFacts(
    num_blocks=20_000,
    block_size=16,
    vocab_size=1000,
    max_context_tokens=131_072,
    eos_token_ids=(2,),
    identity="",
)
# About what Llama-3.1-8B costs on an H200.
COSTS = StepCosts(((1, 0.0055), (128, 0.007), (8192, 0.19)), key_s=3e-8, pair_s=2.5e-10)


class Device:
    """Runs at most two steps at a time, one after the other, in the time that the model says. Its clock stands still
    except while a caller waits, and for the host's part of each launch."""

    def __init__(self, costs: StepCosts, *, host_s: float = 0.0) -> None:
        self.now_s = self.free_s = 0.0
        self.batches: list[Batch] = []
        self.most_in_flight = self._in_flight = 0
        self._costs = costs
        self._host_s = host_s

    def clock(self) -> float:
        return self.now_s

    def launch(self, batch: Batch) -> "Launched":
        self.batches.append(batch)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        self.now_s += self._host_s
        self.free_s = max(self.free_s, self.now_s) + self._costs.seconds(work_of(batch))
        return Launched(self, self.free_s, len(batch.shared_rows))

    def wait(self, end_s: float) -> None:
        self._in_flight -= 1
        self.now_s = max(self.now_s, end_s)


class Launched:
    def __init__(self, device: Device, end_s: float, num_rows: int) -> None:
        self._device, self._end_s, self._num_rows = device, end_s, num_rows

    def wait(self) -> list[RowResult]:
        self._device.wait(self._end_s)
        return [None] * self._num_rows


def work_of(batch: Batch) -> StepWork:
    decodes = [row for row in batch.rows if len(row.token_ids) == 1]
    prompts = [row for row in batch.rows if len(row.token_ids) > 1]
    return StepWork(
        len(decodes),
        sum(row.token_stop for row in decodes),
        sum(len(row.token_ids) for row in prompts),
        sum(chunk_pairs(row.token_start, row.token_stop) for row in prompts),
    )


def profiled(device: Device, *, facts: ModelFacts = FACTS, most_requests: int = 512, **given: Any) -> StepCosts:
    steps = served_steps(facts, most_tokens=8192, most_requests=most_requests)
    return measure_costs(device.launch, facts, steps, agree=int, clock=device.clock, **given)


def off(costs: StepCosts, truth: StepCosts, works: Iterable[StepWork]) -> float:
    return max(abs(costs.seconds(work) / truth.seconds(work) - 1) for work in works)


WORKS = [
    StepWork(1, 300),
    StepWork(16, 16_000),
    StepWork(200, 200 * 700),
    StepWork(prompt_tokens=300, pairs=chunk_pairs(0, 300)),
    StepWork(prompt_tokens=3000, pairs=3 * chunk_pairs(0, 1000)),
    StepWork(prompt_tokens=2048, pairs=chunk_pairs(4096, 6144)),
    StepWork(60, 60_000, 700, chunk_pairs(0, 700)),
]


def test_a_profile_finds_the_costs_of_a_device() -> None:
    assert off(profiled(Device(COSTS)), COSTS, WORKS) < 0.15


def test_the_time_of_a_host_that_launches_slower_than_the_device_counts() -> None:
    slow = Device(COSTS, host_s=0.02)
    assert profiled(slow).dense_s(1) == pytest.approx(0.02, rel=0.05)
    assert slow.most_in_flight == 2
    hidden = profiled(Device(COSTS, host_s=0.004))
    assert hidden.dense_s(1) == pytest.approx(0.0055, rel=0.05)


def test_every_step_counts_as_what_its_rows_are() -> None:
    device = Device(COSTS)
    profiled(device)
    ran = {work_of(batch) for batch in device.batches}
    for step in served_steps(FACTS, most_tokens=8192, most_requests=512):
        most_keys = step.work.keys + step.decode_rows * 8
        assert any(
            replace(work, keys=0) == replace(step.work, keys=0) and step.work.keys <= work.keys <= most_keys
            for work in ran
        )


def test_only_steps_with_prompts_are_measured_with_the_layer_that_drafts() -> None:
    device = Device(COSTS)
    profiled(device)
    for batch in device.batches:
        assert batch.writes_draft_kv == (work_of(batch).prompt_tokens > 0)


def test_decode_rows_advance_by_one_token_and_change_only_with_their_blocks() -> None:
    for block_size, changes in ((16, 0), (4, 1), (1, 6)):
        device, facts = Device(COSTS), replace(FACTS, block_size=block_size)
        measure_costs(device.launch, facts, [ServedStep(3, 100)], agree=int, clock=device.clock)
        for before, after in pairwise(device.batches):
            assert [row.token_start for row in after.rows] == [row.token_start + 1 for row in before.rows]
        assert (
            sum(after.shared_rows[0] is not before.shared_rows[0] for before, after in pairwise(device.batches))
            == changes
        )
        for batch in device.batches:
            assert [len(row.block_ids) for row in batch.rows] == [
                -(-row.token_stop // block_size) for row in batch.rows
            ]


def test_a_slow_model_is_profiled_within_its_time() -> None:
    slow = StepCosts(tuple((tokens, 6 * seconds) for tokens, seconds in COSTS.points), key_s=6e-8, pair_s=1e-9)
    device = Device(slow)
    costs = profiled(device, budget_s=4.0)
    assert device.now_s < 6.0
    assert off(costs, slow, [StepWork(8, 4000), StepWork(prompt_tokens=512, pairs=chunk_pairs(0, 512))]) < 0.3


def test_few_decodes_of_a_mixture_are_measured_however_slow_it_is() -> None:
    """DeepSeek-V3's 61 layers on one H200: each decode reads other experts, up to all of them."""
    mixture = StepCosts(((1, 0.017), (8, 0.059), (32, 0.137), (128, 0.206), (512, 0.35), (2048, 0.7)))
    costs = profiled(Device(mixture))
    assert off(costs, mixture, [StepWork(rows, 0) for rows in (1, 8, 32, 100)]) < 0.1


def test_a_usual_model_is_measured_up_to_its_largest_step_within_the_time() -> None:
    device = Device(COSTS, host_s=0.002)
    profiled(device)
    assert max(work_of(batch).tokens for batch in device.batches) == 8192
    assert device.now_s < 4.0


def test_ranks_that_disagree_measure_the_same_steps() -> None:
    """What one rank finds too slow, no rank measures."""
    fast, slow = Device(COSTS), Device(COSTS)
    votes: list[int] = []

    def record(value: int) -> int:
        votes.append(value)
        return value if len(votes) < 5 else 0

    def repeat(value: int) -> int:
        return min(value, votes[next(places)])

    steps = served_steps(FACTS, most_tokens=8192, most_requests=64)
    measure_costs(slow.launch, FACTS, steps, agree=record, clock=slow.clock)
    places = iter(range(len(votes)))
    votes[4:] = [0] * len(votes[4:])
    measure_costs(fast.launch, FACTS, steps, agree=repeat, clock=fast.clock)
    assert [work_of(batch) for batch in fast.batches] == [work_of(batch) for batch in slow.batches]


@pytest.mark.parametrize("most_tokens", [1, 7, 64, 300, 8192])
@pytest.mark.parametrize("most_requests", [1, 3, 128])
@pytest.mark.parametrize("facts", [FACTS, replace(FACTS, num_blocks=8), replace(FACTS, max_context_tokens=40)])
def test_steps_of_any_limits_fit(most_tokens: int, most_requests: int, facts: ModelFacts) -> None:
    steps = served_steps(facts, most_tokens=most_tokens, most_requests=most_requests)
    assert steps
    device = Device(COSTS)
    measure_costs(device.launch, facts, steps, agree=int, clock=device.clock)
    for batch in device.batches:
        assert len(batch.rows) <= most_requests
        assert sum(len(row.token_ids) for row in batch.rows) <= most_tokens
        assert [len(row.token_ids) == 1 for row in batch.rows] == sorted(
            (len(row.token_ids) == 1 for row in batch.rows), reverse=True
        )
        for row in batch.rows:
            assert row.token_stop <= min(facts.max_context_tokens, facts.num_blocks * facts.block_size)
            assert len(row.block_ids) * facts.block_size >= row.token_stop


def test_a_prefill_node_takes_the_smallest_step_with_nearly_the_best_rate() -> None:
    flat = StepCosts(((1, 0.010), (2048, 0.011), (8192, 0.044)))
    assert choose_step_tokens(flat, STEP_TOKENS, PREFILL_RULE) == 2048
    assert choose_step_tokens(COSTS, STEP_TOKENS, PREFILL_RULE) in (2048, 3072)


def test_a_prefill_node_takes_no_step_for_which_a_short_prompt_waits_too_long() -> None:
    slow = StepCosts(((1, 0.050), (8192, 1.2)))
    chosen = choose_step_tokens(slow, STEP_TOKENS, PREFILL_RULE)
    assert slow.dense_s(chosen) <= 0.15 < slow.dense_s(2 * chosen)


def test_a_decode_node_takes_smaller_steps_than_a_prefill_node() -> None:
    costs = StepCosts(((1, 0.012), (8192, 0.24)), key_s=3e-8)
    decode = choose_step_tokens(costs, STEP_TOKENS, DECODE_RULE)
    assert decode < choose_step_tokens(costs, STEP_TOKENS, PREFILL_RULE)
    assert costs.seconds(StepWork(32, 32_000, decode)) <= 0.06


def test_where_every_step_takes_too_long_none_is_chosen_that_takes_much_longer() -> None:
    assert choose_step_tokens(StepCosts(((1, 0.01), (8192, 90.0))), STEP_TOKENS, StepRule(longest_s=0.05)) == 256
    # Half of DeepSeek-V3 on four H200s: bench/results/half_of_v3.md.
    flat = StepCosts(((1, 0.01), (256, 0.095), (1024, 0.105), (8192, 0.3)), prompt_step_s=0.01)
    chosen = choose_step_tokens(flat, STEP_TOKENS, DECODE_RULE)
    assert chosen == 2048
    assert flat.prompt_tokens_s(chosen) <= 1.6 * flat.prompt_tokens_s(256)


def test_a_decode_node_has_room_for_prompts_next_to_all_its_decodes() -> None:
    assert step_sizes(DECODE_RULE, most_tokens=8192, max_batch_requests=512)[0] == 768
    assert step_sizes(DECODE_RULE, most_tokens=8192, max_batch_requests=100)[0] == 512
    assert step_sizes(PREFILL_RULE, most_tokens=2048, max_batch_requests=512) == [256, 512, 768, 1024, 1536, 2048]
    assert step_sizes(DECODE_RULE, most_tokens=300, max_batch_requests=512) == [300]


def test_seats_depend_on_role_and_cache() -> None:
    large, small = 1 << 20, 1 << 14
    assert [gpu_seats(NodeSettings(), tokens) for tokens in (large, small)] == [512, 256]
    assert [gpu_seats(DecodeSettings(), tokens) for tokens in (large, small)] == [512, 256]
    assert [gpu_seats(PrefillSettings(), tokens) for tokens in (large, small)] == [512, 256]
    only_prompts = PrefillSettings(also_decodes=False)
    assert [gpu_seats(only_prompts, tokens) for tokens in (large, small)] == [128, 128]


def test_a_prefill_node_that_also_decodes_has_long_steps_with_room_next_to_its_decodes() -> None:
    assert step_rule(DecodeSettings()) is DECODE_RULE
    assert step_rule(PrefillSettings(also_decodes=False)) is PREFILL_RULE
    rule = step_rule(PrefillSettings())
    assert rule.longest_s == PREFILL_RULE.longest_s
    assert step_sizes(rule, most_tokens=8192, max_batch_requests=512)[0] == 768


@pytest.fixture
def tiny(llama: tuple[Path, Any]) -> BuiltRunner:
    return build(llama[0], num_blocks=256)


def padded(built: BuiltRunner) -> BuiltRunner:
    """Decodes in the buffers of the graphs."""
    known = built.runner
    graphs = GraphSettings(max_requests=built.limits.max_batch_requests, max_context_tokens=built.cache.shape.num_slots)
    runner = ModelRunner(known.model, known.backend, built.cache, known.facts, graphs=graphs, grammars=built.grammars)
    return built._replace(runner=runner)


@pytest.mark.parametrize("role", [PrefillSettings, DecodeSettings])
@pytest.mark.parametrize("pad", [False, True])
async def test_a_measured_engine_serves_as_before(
    llama: tuple[Path, Any], tiny: BuiltRunner, role: type[NodeSettings], *, pad: bool
) -> None:
    built = calibrate(padded(tiny) if pad else tiny, role(model=llama[0]))
    assert built.costs is not None
    assert built.costs.points[0][1] > 0.0
    async with running(built) as (engine, events):
        engine.submit(request("a", prompt_of(17), greedy(6)))
        await events.finished("a")
    assert events.ids("a") == transformers_greedy(llama[1], prompt_of(17), 6)


def test_a_step_size_that_the_operator_gave_is_kept(llama: tuple[Path, Any], tiny: BuiltRunner) -> None:
    given = calibrate(tiny, NodeSettings(model=llama[0], max_batch_tokens=200))
    assert given.limits == tiny.limits
    assert given.costs is not None
