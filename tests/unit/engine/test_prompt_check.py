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
    assert steps.error(runner._cache) < 1e-3


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
    assert "captured steps with prompts compute other KV" in caplog.text
    before = runner.launches["eager"]
    assert isinstance(runner.run(Batch(0, (row(9),)))[0], TokenOutput)
    assert runner.launches["eager"] == before + 1


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
