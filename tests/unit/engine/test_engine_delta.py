"""A whole engine on tiny models with a delta rule: their tokens equal transformers', with slots of states that requests
pass on to one another."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.engine.tiny import build, greedy, prompt_of, request, running, transformers_greedy
from tests.unit.models.tiny import save_tiny

LENGTHS = (1, 3, 17, 70)


@pytest.fixture(scope="module", params=["qwen3-next", "kimi-linear"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("hybrid")
    return directory, save_tiny(request.param, directory)


@pytest.mark.parametrize("max_batch_tokens", [256, 24])
async def test_batched_tokens_equal_transformers_whether_or_not_prompts_are_cut(
    hybrid: tuple[Path, Any], max_batch_tokens: int
) -> None:
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    async with running(build(hybrid[0]), max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(9)))
        await events.finished(*prompts)
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(hybrid[1], prompt, 9), name


async def test_preempted_requests_give_the_same_tokens(hybrid: tuple[Path, Any]) -> None:
    prompts = {name: prompt_of(9, seed=seed) for seed, name in enumerate("abcd")}
    async with running(build(hybrid[0], num_blocks=11), prefix_cache=False) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(14)))
        await events.finished(*prompts)
        assert engine.load().preemptions > 0
    for name, prompt in prompts.items():
        assert events.ids(name) == transformers_greedy(hybrid[1], prompt, 14), name


@pytest.mark.parametrize("max_batch_tokens", [256, 70])
async def test_a_prefix_with_a_snapshot_gives_the_same_tokens(hybrid: tuple[Path, Any], max_batch_tokens: int) -> None:
    """The snapshot is within a chunk, or at the end of one."""
    prompt = prompt_of(130)
    longer = (*prompt[:129], *prompt_of(9, seed=1))
    async with running(build(hybrid[0], num_blocks=120), max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, tokens in (("first", prompt), ("longer", longer)):
            engine.submit(request(name, tokens, greedy(5)))
            await events.finished(name)
    assert events.started["longer"].cached_tokens >= 64
    assert events.ids("first") == transformers_greedy(hybrid[1], prompt, 5)
    assert events.ids("longer") == transformers_greedy(hybrid[1], longer, 5)
