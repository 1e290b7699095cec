"""Prefill on one GPU, decode on another, as processes: the tokens are those of one engine on one GPU, bit for bit."""

import asyncio
from pathlib import Path

import pytest
import torch

from baton.config import DEMO_MODELS
from baton.types import Path as RequestPath
from baton.types import SamplingParams
from tests.gpu.demo import build_demo, generate
from tests.integration.cluster import machines
from tests.integration.generation import generate as ask
from tests.integration.reference import Reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODELS = (DEMO_MODELS / "llama", DEMO_MODELS / "deepseek")
LENGTHS = [33, 64, 65, 128, 200, 300]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
NODE: dict[str, object] = {"dtype": "bfloat16", "batch_invariant": "on", "num_blocks": 512, "max_batch_tokens": 1024}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_tokens_of_two_gpus_are_those_of_one(model: Path) -> None:
    prompts = Reference(model).prompts(LENGTHS)
    built = build_demo(model, dtype="bfloat16", batch_invariant=True, max_batch_tokens=1024)
    expected = [output.token_ids for output in generate(built, prompts, PARAMS, chunk_align_tokens=512)]
    with machines() as start:
        (prefill, decode) = start.nodes(
            ("prefill", {"model": model, "device": "cuda:0", **NODE}),
            ("decode", {"model": model, "device": "cuda:1", **NODE}),
        )
        gateway = start.gateway([prefill], [decode], model=model, local_policy="strict")

        async def all_of_them() -> list[list[int]]:
            results = await asyncio.gather(*(ask(gateway, prompt, PARAMS) for prompt in prompts))
            assert all(result.proof.path is RequestPath.REMOTE for result in results)
            return [result.token_ids for result in results]

        assert asyncio.run(all_of_them()) == expected
