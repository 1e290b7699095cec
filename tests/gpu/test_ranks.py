"""Nodes with one GPU for each rank: the tokens equal the reference's for any number of ranks on either side."""

import asyncio
from itertools import product
from pathlib import Path

import pytest
import torch

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.settings.config import DEMO_MODELS
from tests.integration.cluster import machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODELS = (DEMO_MODELS / "llama", DEMO_MODELS / "deepseek")
LENGTHS = [33, 64, 129, 300]
MAX_TOKENS = 24
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
# Two nodes share the GPUs. In fp32 another order of sums draws no other token.
NODE: dict[str, object] = {"dtype": "float32", "num_blocks": 512, "max_batch_tokens": 256, "device": "cuda:0"}
RANKS = (2, 1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_any_number_of_ranks_gives_the_same_tokens(model: Path) -> None:
    reference = Reference(model)
    prompts = reference.prompts(LENGTHS)
    expected = [reference.greedy(prompt, MAX_TOKENS).token_ids for prompt in prompts]
    roles = list(product(("prefill", "decode"), RANKS))
    with machines() as start:
        nodes = dict(
            zip(
                roles,
                start.nodes(
                    *((role, {"model": model, "tensor_parallel_size": ranks, **NODE}) for role, ranks in roles)
                ),
                strict=True,
            )
        )

        async def tokens(senders: int, receivers: int) -> list[list[int]]:
            prefill, decode = nodes["prefill", senders], nodes["decode", receivers]
            gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")
            results = await asyncio.gather(*(generate(gateway, prompt, PARAMS) for prompt in prompts))
            assert all(result.proof.path is RequestPath.REMOTE for result in results)
            for node in (prefill, decode):
                await until_status(node, nothing_held)
            start.end(gateway)
            return [result.token_ids for result in results]

        for senders, receivers in product(RANKS, RANKS):
            assert asyncio.run(tokens(senders, receivers)) == expected, f"{senders} to {receivers} ranks"
        for node in nodes.values():
            assert start.end(node) == 0
