"""Many concurrent requests through a prefill and a decode node that share a GPU: each gets the tokens of a single
engine, however prefill, sending, receiving and decode interleave."""

import asyncio
from pathlib import Path

import pytest

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.settings.config import DEMO_MODELS
from tests.gpu.demo import build_demo, generate
from tests.integration.cluster import machines
from tests.integration.generation import generate as ask
from tests.integration.reference import Reference

pytestmark = pytest.mark.gpu

LENGTHS = [20 + 37 * number % 281 for number in range(96)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NODE: dict[str, object] = {
    "device": "cuda:0",
    "dtype": "bfloat16",
    "batch_invariant": "on",
    "num_blocks": 4096,
    "max_batch_tokens": 1024,
}


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_each_of_many_requests_at_once_gets_its_own_tokens(model: str) -> None:
    directory: Path = DEMO_MODELS / model
    prompts = Reference(directory).prompts(LENGTHS)
    built = build_demo(directory, dtype="bfloat16", batch_invariant=True, num_blocks=4096, max_batch_tokens=1024)
    expected = [output.token_ids for output in generate(built, prompts, PARAMS.resolved())]
    with machines() as start:
        (prefill, decode) = start.nodes(
            ("prefill", {"model": directory, **NODE}), ("decode", {"model": directory, **NODE})
        )
        gateway = start.gateway([prefill], [decode], model=directory, local_policy="strict")

        async def all_at_once() -> list[list[int]]:
            results = await asyncio.gather(*(ask(gateway, prompt, PARAMS) for prompt in prompts))
            assert all(result.proof.path is RequestPath.REMOTE for result in results)
            return [result.token_ids for result in results]

        for _ in range(2):  # the second time with all prefixes cached on either node
            assert asyncio.run(all_at_once()) == expected
