"""Guessed tokens on real processes: the same tokens as without, wherever guesses come from, and receipts of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cli.processes import Process
from tests.integration.cluster import DEEPSEEK, LLAMA, Machines, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import References
from tests.integration.test_tokens import GREEDY, LENGTHS, MAX_TOKENS, assert_same

NODE = {"num_blocks": 512, "max_batch_tokens": 64, "speculation": "always"}


@pytest.fixture(scope="module", params=[LLAMA, DEEPSEEK], ids=["llama", "deepseek"])
def model(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[tuple[Machines, Process, Process, Process]]:
    """Machines, prefill node, decode node, and a gateway in front of them."""
    with machines() as start:
        prefill, decode = start.nodes(
            ("prefill", {"model": model, **NODE}), ("decode", {"model": model, "block_size": 32, **NODE})
        )
        yield start, prefill, decode, start.gateway([prefill], [decode], model=model)


@pytest.mark.slow
async def test_twenty_prompts_at_once_equal_transformers(
    pair: tuple[Machines, Process, Process, Process], model: Path, references: References
) -> None:
    _, prefill, decode, gateway = pair
    reference = references[model]
    prompts = reference.prompts(LENGTHS)
    # Repetitive prompts, so that there is something to guess.
    prompts = [[*prompt[: len(prompt) // 2], *prompt[: len(prompt) // 2]] for prompt in prompts]
    for _ in range(2):
        results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens")
    drafted = sum(result.proof.drafted_tokens for result in results)
    accepted = sum(result.proof.accepted_tokens for result in results)
    print("DRAFTED", drafted, accepted)
    assert 0 < accepted < drafted
    await until_status(prefill, nothing_held)
    await until_status(decode, nothing_held)
