"""Steps on a runner: their tokens, the state that they leave on the device for the next step, and how callers wait.
Each test covers steps outside of graphs, and decodes and prompts in the buffers of the graphs."""

import time
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from baton.core.errors import InternalError
from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.inputs import stage_step
from baton.engine.device.runner import ModelRunner
from baton.engine.request import int_array
from tests.unit.engine.driver import Driver, runner_of
from tests.unit.engine.tiny import build, prompt_of, transformers_greedy

GRAPHS = GraphSettings(max_requests=8, max_context_tokens=96)
PROMPTS = replace(GRAPHS, max_tokens=40)


@pytest.fixture(params=[None, GRAPHS, PROMPTS], ids=["eager", "padded", "prompts"])
def runner(request: pytest.FixtureRequest, llama: tuple[Path, Any]) -> ModelRunner:
    runner = runner_of(build(llama[0], num_blocks=384), graphs=request.param)
    runner.prepare()
    return runner


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5},
    "min_p": {"temperature": 1.5, "min_p": 0.1, "seed": 2**64 - 3},
    "top": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 8},
    "biased": {"logit_bias": {5: 3.0, 9: -100.0}},
}


def drive(runner: ModelRunner, *, ahead: bool) -> Driver:
    """Requests of all kinds that arrive, pause, move and leave."""
    driver = Driver(runner, ahead=ahead)
    names = list(SAMPLINGS)
    for seed, (name, sampling) in enumerate(SAMPLINGS.items()):
        driver.add(name, prompt_of(3 + 4 * seed, seed=seed), **sampling)
    for count in range(1, len(names) + 1):
        driver.step(*names[:count], chunk=6)
    for _ in range(3):
        driver.step(*names)
    for _ in range(5):
        driver.step(*names)
    driver.step(*names[1::2])
    driver.step(*reversed(names))
    driver.move("logprobs")
    for _ in range(4):
        driver.step(*names[2:], names[0])
    return driver


@pytest.mark.parametrize("num_blocks", [1, 2, 16, 17])
def test_a_step_has_a_block_table_that_no_kernel_is_compiled_anew_for(num_blocks: int) -> None:
    row = BatchRow("", int_array([3]), 4 * num_blocks - 1, int_array(list(range(num_blocks))), None)
    table = stage_step([row], torch.zeros(1, dtype=torch.int32), block_size=4).common.block_table_tensor
    assert table.stride(0) == -(-num_blocks // 16) * 16
    assert table[0].tolist() == [*range(num_blocks), *[0] * (table.stride(0) - num_blocks)]


def test_greedy_tokens_equal_transformers(runner: ModelRunner, llama: tuple[Path, Any]) -> None:
    driver = Driver(runner)
    prompts = {"short": prompt_of(2, seed=1), "long": prompt_of(21, seed=2), "other": prompt_of(9, seed=3)}
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    driver.step("short")
    driver.step("short", "long", chunk=8)
    driver.step("short", "long", "other", chunk=8)
    for _ in range(12):
        driver.step("short", "long", "other", chunk=8)
    for name, prompt in prompts.items():
        ids = driver.ids(name)
        assert len(ids) >= 12
        assert ids == transformers_greedy(llama[1], prompt, len(ids)), name


def test_steps_launched_ahead_draw_the_tokens_of_single_steps(runner: ModelRunner) -> None:
    plain, ahead = drive(runner, ahead=False), drive(runner, ahead=True)
    for name in SAMPLINGS:
        assert [token.index for token in plain.outputs(name)] == list(range(len(plain.outputs(name))))
        assert len(plain.outputs(name)) > 8
        assert ahead.ids(name) == plain.ids(name), name
        for ours, theirs in zip(ahead.outputs(name), plain.outputs(name), strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


def test_padded_steps_draw_the_tokens_of_steps_outside_of_graphs(llama: tuple[Path, Any]) -> None:
    built = build(llama[0], num_blocks=384)
    padded, eager = runner_of(built, graphs=GRAPHS), runner_of(built, graphs=None)
    padded.prepare()
    ours, theirs = drive(padded, ahead=True), drive(eager, ahead=True)
    for name in SAMPLINGS:
        assert ours.ids(name) == theirs.ids(name), name
    sampled = zip(ours.outputs("logprobs"), theirs.outputs("logprobs"), strict=True)
    assert all(len(our.top_logprobs) == 3 for our in ours.outputs("logprobs"))
    assert all(our.logprob == pytest.approx(their.logprob, abs=1e-5) for our, their in sampled)


def test_a_row_that_is_not_sampled_has_no_token(runner: ModelRunner) -> None:
    """A chunk of a prompt, also one of a single token."""
    blocks = int_array([0, 1])
    rows = BatchRow("a", int_array([3]), 0, blocks, None), BatchRow("b", int_array([4, 5]), 0, int_array([2]), None)
    assert runner.run(Batch(0, rows)) == [None, None]
    assert runner.run(Batch(1, rows[:1])) == [None]


def test_the_step_after_a_failed_one_runs(runner: ModelRunner) -> None:
    """The next step reads tokens that were never sampled, of rows that may not exist."""
    driver = Driver(runner)
    driver.add("a", prompt_of(5))
    driver.step("a")
    too_few_blocks = BatchRow("bad", int_array([3] * 9), 0, int_array([90]), None)
    with pytest.raises(InternalError, match="blocks"):
        runner.launch(Batch(1, (too_few_blocks,)))
    void = BatchRow("void", int_array([0]), 0, int_array([91]), None, token_source=7)
    assert runner.run(Batch(2, (void,))) == [None]
    driver.step("a")
    assert len(driver.ids("a")) == 2


def test_another_thread_may_wait_for_a_step(runner: ModelRunner) -> None:
    began_s = time.perf_counter()
    launched = runner.launch(Batch(0, (BatchRow("a", int_array([3, 4]), 0, int_array([0]), None),)))
    waited: list[Any] = []
    thread = Thread(target=lambda: waited.append(launched.wait()))
    thread.start()
    thread.join()
    assert waited == [[None]]
    assert 0 < launched.seconds < time.perf_counter() - began_s


def test_more_rows_than_the_buffers_have_are_refused(built: BuiltRunner) -> None:
    runner = runner_of(built, graphs=GRAPHS)
    rows = tuple(BatchRow("", int_array([3]), 0, int_array([0]), None) for _ in range(65))
    with pytest.raises(InternalError, match="65 rows"):
        runner.launch(Batch(0, rows))


def test_a_batch_above_the_largest_size_runs_outside_of_graphs(built: BuiltRunner) -> None:
    graphs = GraphSettings(max_requests=8, max_context_tokens=96, largest=2)
    small, eager = runner_of(built, graphs=graphs), runner_of(built, graphs=None)
    small.prepare()
    ids = []
    for runner in (small, eager):
        driver = Driver(runner, ahead=True)
        for name in "abc":
            driver.add(name, prompt_of(4, seed=ord(name)))
        for names in ("a", "ab", "abc", "abc", "abc", "ab", "cb", "abc"):
            driver.step(*names)
        ids.append([driver.ids(name) for name in "abc"])
    assert ids[0] == ids[1]
