"""Captured steps with prompts are compared with steps outside of graphs before they serve; on a CPU, padded steps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.core.types import TokenOutput
from baton.engine.batch import Batch
from baton.engine.device.graphs import GraphSettings
from baton.engine.device.prompt_check import CheckedSteps
from baton.engine.device.prompt_graphs import PromptGraphs
from baton.engine.device.runner import ModelRunner
from baton.engine.request import ModelFacts
from tests.unit.engine.driver import runner_of
from tests.unit.engine.test_prompt_graphs import row
from tests.unit.engine.tiny import build
from tests.unit.models.tiny import save_tiny

GRAPHS = GraphSettings(max_requests=8, max_context_tokens=96, max_tokens=48)


def prepared(directory: Path) -> ModelRunner:
    runner = runner_of(build(directory), graphs=GRAPHS)
    runner.prepare()
    return runner


@pytest.mark.parametrize("family", ["llama", "deepseek-v3", "gpt-oss", "qwen3-next", "gemma3"])
def test_equal_steps_stay(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    runner = prepared(tmp_path)
    assert runner._prompts is not None
    before = runner.launches["prompt_graph"]
    runner._check_prompts()
    assert runner.launches["prompt_graph"] - before == 2
    assert runner._prompts.sizes
    steps = CheckedSteps(runner.facts)
    assert steps.fit
    assert steps.agree(runner._cache)


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_steps_that_compute_something_else_are_not_used(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(family, tmp_path)
    runner = prepared(tmp_path)
    assert runner._prompts is not None
    right = PromptGraphs._run

    def wrong(self: PromptGraphs, size: int, build: Any) -> None:
        self.buffers.positions.zero_()
        right(self, size, build)

    monkeypatch.setattr(PromptGraphs, "_run", wrong)
    runner._check_prompts()
    assert "captured steps with prompts write other KV" in caplog.text
    before = runner.launches["eager"]
    assert isinstance(runner.run(Batch(0, (row(9),)))[0], TokenOutput)
    assert runner.launches["eager"] == before + 1


@pytest.mark.parametrize("token", [2, 9], ids=["of a prompt", "of a decode"])
def test_one_row_that_is_wrong_counts(token: int, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    runner = prepared(tmp_path)
    runner._check_prompts()
    steps, cache = CheckedSteps(runner.facts), runner._cache
    size = runner.facts.block_size
    tokens = [token] if token == 9 else range(9)
    for each in tokens:
        cache.view[1, :, each // size, each % size] *= 1.3
    assert not steps.agree(cache)


def test_each_owner_has_a_prompt() -> None:
    facts = ModelFacts(600, 16, vocab_size=99, max_context_tokens=64, eos_token_ids=(), identity="", num_owners=5)
    _, step = CheckedSteps(facts).batches(0)
    assert {row.owner for row in step.rows} == set(range(5))
    blocks = [block for row in step.rows for block in row.block_ids]
    assert blocks == list(range(CheckedSteps(facts).num_blocks))


def test_steps_that_do_not_fit_are_not_run(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    runner = prepared(tmp_path)
    facts = runner.facts
    for small in (
        replace(facts, num_blocks=9),
        replace(facts, max_context_tokens=14),
        replace(facts, state_slots=2),
    ):
        runner.facts = small
        before = dict(runner.launches)
        runner._check_prompts()
        assert runner.launches == before
