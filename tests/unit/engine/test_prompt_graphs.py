"""Steps with prompts in the buffers of the graphs: for any mix of decodes and prompts a padded step equals the step
outside of graphs, in its tokens and in the KV that it leaves. Which sizes are captured."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention.metadata import PaddedBatch
from baton.core.errors import InternalError
from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.layer_marks import LayerMark
from baton.engine.device.prompt_buffers import most_prompts
from baton.engine.device.prompt_graphs import token_sizes
from baton.engine.device.runner import ModelRunner
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.engine.scheduling.scheduler import Scheduler
from tests.unit.engine.driver import runner_of
from tests.unit.engine.limits import limits
from tests.unit.engine.test_graphs import load_with
from tests.unit.engine.tiny import BLOCK_SIZE, build, prompt_of, request
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

GRAPHS = GraphSettings(max_requests=8, max_context_tokens=96, max_tokens=48)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 5, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 9, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 5, "max_tokens": 8},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": {5: 3.0, 9: -100.0}},
)


class Run:
    """The steps of a scheduler on one runner: each is launched while the previous one runs."""

    def __init__(self, runner: ModelRunner, budget: int) -> None:
        self.runner = runner
        self._scheduler = Scheduler(limits(max_batch_tokens=budget, max_batch_requests=8), runner.facts)
        self._in_flight: list[Any] = []
        self.tokens: dict[str, list[TokenOutput]] = {}
        self.scored: dict[str, tuple[PromptLogprob, ...]] = {}
        self.sizes: list[tuple[int, int]] = []

    def submit(self, name: str, length: int, kind: int, max_tokens: int) -> None:
        sampling = ResolvedSampling(**{"max_tokens": max_tokens, "ignore_eos": True, **KINDS[kind]})
        self._scheduler.submit(request(name, prompt_of(length, seed=kind), sampling), 0.0)

    def abort(self, name: str) -> None:
        self._scheduler.abort(name)

    def step(self) -> bool:
        """Whether anything is left to do."""
        batch = self._scheduler.schedule(0.0)
        if batch is not None:
            self._in_flight.append(self.runner.launch(batch))
            self.sizes.append((len(batch.rows), sum(len(row.token_ids) for row in batch.rows)))
        if self._in_flight and (batch is None or len(self._in_flight) == 2):
            step = self._in_flight.pop(0)
            events = self._scheduler.complete(step.wait(), 0.0, step.scores)
            assert not events.failed
            for sampled in events.tokens:
                self.tokens.setdefault(sampled.request_id, []).append(sampled.token)
            self.scored |= {scored.request_id: scored.logprobs for scored in events.scored}
        return batch is not None or bool(self._in_flight)


arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(0, len(KINDS) - 1), st.integers(1, 9)),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module")
def of_blocks(llama: tuple[Path, Any]) -> dict[int, BuiltRunner]:
    """With few blocks requests are preempted."""
    return {num_blocks: build(llama[0], num_blocks=num_blocks) for num_blocks in (24, 64)}


@settings(max_examples=10, deadline=None)
@given(arrivals=arrivals, budget=st.integers(8, 48), num_blocks=st.sampled_from([24, 64]), aborted=st.integers(0, 20))
def test_any_mix_of_steps_gives_the_tokens_and_the_kv_of_eager_steps(
    of_blocks: dict[int, BuiltRunner],
    arrivals: list[tuple[int, int, int, int]],
    budget: int,
    num_blocks: int,
    aborted: int,
) -> None:
    """Prompts in chunks, with cached prefixes, preempted and aborted; every kind of sampling; steps launched ahead."""
    runs = []
    for graphs in (GRAPHS, None):
        runner = runner_of(of_blocks[num_blocks], graphs=graphs)
        runner.prepare()
        run = Run(runner, budget)
        due = sorted((step, place, *rest) for place, (step, *rest) in enumerate(arrivals))
        number = 0
        while run.step() or due:
            while due and due[0][0] <= number:
                _, place, length, kind, max_tokens = due.pop(0)
                run.submit(f"r{place}", length, kind, max_tokens)
            number += 1
            if number == aborted:
                run.abort("r0")
        runs.append(run)
    ours, theirs = runs
    assert ours.sizes == theirs.sizes
    assert ours.tokens.keys() == theirs.tokens.keys()
    for name, tokens in theirs.tokens.items():
        assert [token.token_id for token in ours.tokens[name]] == [token.token_id for token in tokens], name
        for our, their in zip(ours.tokens[name], tokens, strict=True):
            assert our.logprob == pytest.approx(their.logprob, abs=1e-4)
    assert ours.scored.keys() == theirs.scored.keys()
    for name, scores in theirs.scored.items():
        assert [each.logprob for each in ours.scored[name]] == pytest.approx(
            [each.logprob for each in scores], abs=1e-4
        )
    assert_equal_but_for_rounding(*(run.runner._cache.storage for run in runs))


def assert_equal_but_for_rounding(ours: Tensor, theirs: Tensor) -> None:
    """A product over more rows may add in another order, which is a few of the last bits of the largest numbers."""
    atol = 2e-6 * float(theirs.nan_to_num().abs().max())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, equal_nan=True)


def mixed_steps(num_steps: int, *, whole: bool = False) -> Iterator[Batch]:
    """Decodes and chunks of prompts, of one to five requests with scattered blocks.

    Args:
        whole: a request decodes after its first step.
    """
    draw = np.random.default_rng(0)
    blocks = draw.permutation(60).reshape(5, 12).tolist()
    computed = [0] * 5
    for step in range(num_steps):
        live = [each for each in range(5) if step % 3 >= each % 3 and computed[each] < 40]
        lens = {each: 1 if draw.random() < 0.5 else int(draw.integers(2, 8)) for each in live}
        if whole:
            lens = {each: 1 if computed[each] else max(2, lens[each]) for each in live}
        rows = [
            BatchRow(
                "",
                int_array(draw.integers(3, VOCAB_SIZE, lens[each]).tolist()),
                computed[each],
                int_array(blocks[each][: -(-(computed[each] + lens[each]) // BLOCK_SIZE)]),
                SampleRow(ResolvedSampling(temperature=0.0), 0, (), int_array(), 0) if draw.random() < 0.8 else None,
            )
            for each in sorted(live, key=lambda each: lens[each] > 1)
        ]
        for each in live:
            computed[each] += lens[each]
        yield Batch(step, tuple(rows))


@pytest.mark.parametrize("family", ["deepseek-v2", "mistral-window", "gpt-oss", "llama4", "gemma3", "bloom"])
def test_families_give_the_same_tokens_and_kv(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    built = build(tmp_path)
    padded, eager = (runner_of(built, graphs=graphs) for graphs in (GRAPHS, None))
    padded.prepare()
    for batch in mixed_steps(12):
        assert padded.run(batch) == eager.run(batch)
    assert_equal_but_for_rounding(padded._cache.storage, eager._cache.storage)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "batch_invariant"),
    [
        ("mistral-window", "TRITON_ATTN", False),
        ("gpt-oss", "TRITON_ATTN", False),
        ("deepseek-v3", "TRITON_MLA", False),
        ("deepseek-v3", "TRITON_MLA", True),
    ],
)
def test_a_captured_step_depends_on_no_value_of_the_host(
    family: str, name: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata that graphs are captured with, filled in place by each step, in Triton's interpreter."""
    save_tiny(family, tmp_path)
    built = build(tmp_path)
    eager = runner_of(built, graphs=None)
    model, backend = load_with(name, tmp_path, built, batch_invariant=batch_invariant)
    padded = ModelRunner(
        model, backend, runner_of(built, graphs=None)._cache, built.runner.facts, graphs=GRAPHS, grammars=built.grammars
    )
    assert backend.builder.captures_prompts
    prompts = padded._prompts
    assert prompts is not None
    batches: dict[int, PaddedBatch] = {size: prompts.buffers.padded(size) for size in prompts._wanted}
    monkeypatch.setattr(
        prompts,
        "_uncaptured",
        lambda size: lambda: prompts._run(size, lambda: backend.builder.build_padded(batches[size])),
    )
    prompts.capture()
    prompts._with_context = with_context = backend.builder.captures_context
    for batch in mixed_steps(4, whole=not with_context):
        assert prompts.size_for(batch.rows) is not None
        assert padded.run(batch) == eager.run(batch)
    assert padded.launches["prompt_graph"] > 2
    assert (prompts.size_for([row(1, start=3), row(4, start=9)]) is None) == (not with_context)
    torch.testing.assert_close(padded._cache.storage, eager._cache.storage, rtol=1e-3, atol=1e-4, equal_nan=True)


def row(num_tokens: int, *, start: int = 0, sampled: bool = True) -> BatchRow:
    blocks = int_array(list(range(-(-(start + num_tokens) // BLOCK_SIZE))))
    sample = SampleRow(ResolvedSampling(temperature=0.0), 0, (), int_array(), 0) if sampled else None
    return BatchRow("", int_array([3] * num_tokens), start, blocks, sample)


def prepared(built: BuiltRunner, graphs: GraphSettings = GRAPHS) -> ModelRunner:
    runner = runner_of(built, graphs=graphs)
    runner.prepare()
    return runner


def test_steps_above_the_largest_size_or_with_too_many_prompts_run_outside_of_graphs(built: BuiltRunner) -> None:
    prompts = prepared(built)._prompts
    assert prompts is not None
    assert prompts.sizes == [16, 32, 48]
    assert [prompts.size_for([row(count)]) for count in (2, 16, 17, 48, 49)] == [16, 16, 32, 48, None]
    assert prompts.size_for([row(1)] * 8) == 16
    assert prompts.size_for([row(1)] * 9) is None
    many = prepared(built, GraphSettings(max_requests=64, max_context_tokens=96, max_tokens=320))._prompts
    assert many is not None
    assert many.size_for([row(1)] * 3 + [row(2)] * most_prompts(16)) == 32
    assert many.size_for([row(1)] * 3 + [row(2)] * 20) == 320


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing(built: BuiltRunner) -> None:
    runner = prepared(built)
    assert runner.run(Batch(0, (row(5, sampled=False),))) == [None]
    tokens = runner.run(Batch(1, (row(1, start=5), row(7, sampled=False))))
    assert isinstance(tokens[0], TokenOutput)
    assert tokens[1] is None


def test_a_prompt_with_too_many_blocks_is_refused_and_the_next_step_runs(built: BuiltRunner) -> None:
    runner = prepared(built)
    too_long = row(5)._replace(block_ids=int_array([0] * 300))
    with pytest.raises(InternalError, match="300 blocks"):
        runner.launch(Batch(0, (too_long,)))
    too_short = row(5)._replace(block_ids=int_array([0]))
    with pytest.raises(InternalError, match="blocks for 4"):
        runner.launch(Batch(1, (too_short,)))
    assert isinstance(runner.run(Batch(2, (row(5),)))[0], TokenOutput)


def test_prompt_logprobs_come_from_the_same_steps(built: BuiltRunner) -> None:
    targets = prompt_of(9)
    prompt = row(9)._replace(token_ids=int_array(targets))
    batch = Batch(0, (row(1), prompt), scores=((1, ScoreRow(int_array(targets[1:]), 2)),))
    scores = []
    for graphs in (GRAPHS, None):
        runner = runner_of(built, graphs=graphs)
        runner.prepare()
        step = runner.launch(batch)
        step.wait()
        scores.append([each.logprob for each in step.scores[1]])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_steps_in_the_buffers_have_the_marks_that_they_ask_for(built: BuiltRunner) -> None:
    marks: list[LayerMark] = []
    prepared(built).launch(Batch(0, (row(9),), layers_per_group=1), marks.append).wait()
    num_layers = built.config.num_layers
    assert [mark.layer_stop for mark in marks] == list(range(1, num_layers))


@pytest.mark.parametrize("largest", [1, 16, 40, 256, 1000, 2048, 4096])
def test_captured_sizes_reach_the_largest_and_pad_little(largest: int) -> None:
    sizes = token_sizes(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 32
    assert all(after <= 1.25 * before for before, after in pairwise(sizes) if before >= 256)
