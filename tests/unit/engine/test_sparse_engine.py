"""Models that attend to selected tokens, through the whole engine on a CPU: tokens equal transformers'."""

from pathlib import Path

import pytest

from baton.engine.build import BuiltRunner
from tests.unit.engine.tiny import build, greedy, prompt_of, request, running, transformers_greedy
from tests.unit.models.tiny import save_tiny

MAX_TOKENS = 8


@pytest.fixture(scope="module", params=["deepseek-v32", "glm-moe-dsa-shared-selection"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[BuiltRunner, object]:
    directory: Path = tmp_path_factory.mktemp("model")
    reference = save_tiny(request.param, directory)
    return build(directory), reference


@pytest.mark.parametrize("max_batch_tokens", [7, 64])
async def test_greedy_tokens_of_many_requests_in_chunks_of_any_size(
    pair: tuple[BuiltRunner, object], max_batch_tokens: int
) -> None:
    built, reference = pair
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (3, 6, 19, 33)}
    async with running(built, prefix_cache=False, max_batch_tokens=max_batch_tokens) as (engine, events):
        for name, prompt in prompts.items():
            engine.submit(request(name, prompt, greedy(MAX_TOKENS)))
        await events.finished(*prompts)
        for name, prompt in prompts.items():
            assert events.ids(name) == transformers_greedy(reference, prompt, MAX_TOKENS), name


async def test_a_prefix_in_the_cache_has_its_index_keys_too(pair: tuple[BuiltRunner, object]) -> None:
    built, reference = pair
    first = prompt_of(30, seed=5)
    second = (*first[:24], *prompt_of(9, seed=6))
    async with running(built) as (engine, events):
        for name, prompt in (("first", first), ("second", second)):
            engine.submit(request(name, prompt, greedy(MAX_TOKENS)))
            await events.finished(name)
            assert events.ids(name) == transformers_greedy(reference, prompt, MAX_TOKENS)
        assert events.started["second"].cached_tokens == 24
