"""Attention data parallelism where tokens go to the ranks of their experts through the ranks' memory: kernels in the
interpreter, in processes that map the same files."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import build
from baton.models.kernels.moe import expert_dispatch
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.parallel import TensorParallel
from tests.ranks import run_ranks
from tests.unit.engine.owners import Outcome, Scene, compute_alone, compute_as_owner, logprobs_of, tokens_of
from tests.unit.engine.test_attention_data_parallel import drawn, greedy, prompt
from tests.unit.models.peer_files import with_dispatch_files
from tests.unit.models.tiny import save_tiny

RANKS = 2
ROWS = 4  # decodes are sent, and prompts are gathered
REQUESTS = [(prompt(12, 1), greedy(3)), (prompt(3, 2), drawn(2) | {"max_tokens": 4}), (prompt(25, 3), greedy(2))]


@dataclass(frozen=True)
class Seen:
    """Outcomes of one rank, and the launches with which it sent tokens, by scene."""

    gathered: dict[str, Outcome]
    sent: dict[str, Outcome]
    launches: dict[str, int]


def compute(rank: TensorParallel, directory: Path, scenes: Mapping[str, Scene]) -> Seen:
    """Without memory of peers, all ranks gather tokens, and each has whole shared experts as it has with it."""
    launches, send, files = dict.fromkeys(scenes, 0), expert_dispatch.send, 0

    def count(*args: Any, **options: Any) -> torch.Tensor:
        launches[list(scenes)[files - 1]] += 1
        return send(*args, **options)

    def share(model: CausalLM, *, dtype: torch.dtype, device: torch.device) -> None:
        nonlocal files
        files += 1
        assert model.config.moe is not None
        own = directory / str(files)
        own.mkdir(exist_ok=True)
        width, choices = model.config.hidden_size, model.config.moe.experts_per_token
        joined = with_dispatch_files(model.parallel, own, rows=ROWS, width=width, choices=choices, dtype=dtype)
        model.join(joined, vocab_size=model.vocab_size)

    parallel = replace(rank, share_memory=True)
    gathered = compute_as_owner(parallel, scenes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "share_memory", share)
        patch.setattr(expert_dispatch, "send", count)
        sent = compute_as_owner(parallel, scenes)
    return Seen(gathered, sent, launches)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    model = tmp_path_factory.mktemp("models") / "deepseek-v3"
    save_tiny("deepseek-v3", model)
    return {
        "steps of unequal rows": Scene(model, REQUESTS, batch_tokens=32, batch_invariant=True),
        "buffers of graphs": Scene(model, REQUESTS, batch_tokens=32, graphs=True),
        "a rank without requests": Scene(model, REQUESTS[:1], graphs=True),
    }


@pytest.fixture(scope="module")
def together(scenes: dict[str, Scene], tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "files").mkdir()
    return run_ranks(compute, RANKS, directory, directory / "files", scenes)


def test_tokens_and_logprobs_are_those_of_one_process(scenes: dict[str, Scene], together: list[Seen]) -> None:
    alone = compute_alone(scenes)
    for rank in together:
        assert all(rank.launches[name] > 0 for name in scenes)
        for outcomes in (rank.gathered, rank.sent):
            for name, outcome in outcomes.items():
                assert tokens_of(outcome) == tokens_of(alone[name]), name
                torch.testing.assert_close(logprobs_of(outcome), logprobs_of(alone[name]), atol=1e-4, rtol=0)


def test_batch_invariant_steps_have_the_bits_of_a_gather(together: list[Seen]) -> None:
    for rank in together:
        assert torch.equal(
            logprobs_of(rank.sent["steps of unequal rows"]), logprobs_of(rank.gathered["steps of unequal rows"])
        )
