"""Warm-up runs a step of every kind, because each kind has kernels of its own."""

import torch

from baton.engine.batch import Batch
from baton.engine.build import BuiltRunner
from baton.engine.device.warm_up import warm_up
from tests.unit.engine.driver import runner_of


def test_warm_up_runs_prompts_and_decodes_scores_and_pooling(built: BuiltRunner) -> None:
    runner = runner_of(built, graphs=None)
    ran: list[Batch] = []

    def run(batch: Batch) -> None:
        ran.append(batch)
        runner.run(batch)

    warm_up(run, runner.facts, torch.device("cpu"), drafts=False)
    kinds = {tuple((row.token_start > 0, len(row.token_ids) > 1) for row in batch.rows) for batch in ran}
    decode, prompt, continued = (False, False), (False, True), (True, True)
    one = {(prompt,), (continued,), (decode, prompt), (decode, continued)}
    assert kinds == one | {(prompt, prompt), (decode, prompt, prompt)}
    assert any(batch.scores for batch in ran)
    assert any(batch.pools for batch in ran)
