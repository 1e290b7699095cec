"""Engines on tiny models with layers of Mamba-2: their tokens equal those that transformers computes from whole
sequences, through cuts, preemption and reused prefixes.

NOTE: transformers' own generation limits steps in time in prompts and not in decodes, so it is not a reference here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.tiny import build, greedy, prompt_of, request, running
from tests.unit.models.tiny import save_tiny

Saved = tuple[Path, Any]
LENGTHS = (1, 17, 70, 131)


@pytest.fixture(scope="module", params=["granite-hybrid", "bamba", "nemotron-h", "falcon-h1"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    directory = tmp_path_factory.mktemp("mamba")
    return directory, save_tiny(request.param, directory)


@torch.inference_mode()
def expected(model: Any, prompt: Sequence[int], ours: Sequence[int]) -> list[int]:
    """The best token after the prompt and after each of our tokens but the last."""
    tokens = torch.tensor([[*prompt, *ours[:-1]]])
    best: list[int] = model(tokens, use_cache=False).logits[0, len(prompt) - 1 :].argmax(-1).tolist()
    return best


@pytest.mark.parametrize("max_batch_tokens", [256, 70])
async def test_batched_tokens_equal_transformers_whether_or_not_prompts_are_cut(
    saved: Saved, max_batch_tokens: int
) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(build(saved[0], num_blocks=100), max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(6)))
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == expected(saved[1], prompt, events.ids(name)), name


async def test_preempted_requests_give_the_same_tokens(saved: Saved) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(saved[0], num_blocks=12), prefix_cache=False) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(12)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert events.ids(name) == expected(saved[1], prompt, events.ids(name)), name


@pytest.mark.parametrize("max_batch_tokens", [256, 70])
async def test_a_prefix_with_a_snapshot_gives_the_same_tokens(saved: Saved, max_batch_tokens: int) -> None:
    """The snapshot is within a chunk, or at the end of one."""
    prompt = prompt_of(130)
    longer = (*prompt[:129], *prompt_of(9, seed=1))
    async with running(build(saved[0], num_blocks=120), max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, tokens in (("first", prompt), ("same", prompt), ("longer", longer)):
            engine.submit(request(name, tokens, greedy(5)))
            await events.finished(name)
    assert events.started["first"].cached_tokens == 0
    assert min(events.started[name].cached_tokens for name in ("same", "longer")) >= 64
    assert events.ids("first") == events.ids("same") == expected(saved[1], prompt, events.ids("first"))
    assert events.ids("longer") == expected(saved[1], longer, events.ids("longer"))
