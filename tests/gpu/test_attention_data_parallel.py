"""Nodes whose two GPUs have requests of their own give the tokens of the reference, with CUDA graphs and without."""

import asyncio
from pathlib import Path

import pytest
import torch

from baton.core.types import Path as RequestPath
from baton.settings.config import DEMO_MODELS
from tests.gpu.test_ranks import MAX_TOKENS, NODE, PARAMS
from tests.integration.cluster import Flags, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_mtp_pair_of_kinds import save_with_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODEL = DEMO_MODELS / "deepseek"
OWN = {"tensor_parallel_size": 2, "expert_parallel": True, "attention_data_parallel": True}
# Equal numbers of decodes on both ranks, unequal ones, and one request.
LENGTHS = [[33, 64, 129, 300], [17, 200, 5], [90]]


@pytest.mark.parametrize("graphs", [True, False])
def test_ranks_with_requests_of_their_own_give_the_same_tokens(*, graphs: bool) -> None:
    reference = Reference(MODEL)
    flags = {**NODE, **OWN, "model": MODEL, "cuda_graphs": graphs}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
        gateway = start.gateway([prefill], [decode], model=MODEL, local_policy="strict")

        async def tokens(prompts: list[list[int]]) -> list[list[int]]:
            results = await asyncio.gather(*(generate(gateway, prompt, PARAMS) for prompt in prompts))
            assert all(result.proof.path is RequestPath.REMOTE for result in results)
            for node in (prefill, decode):
                await until_status(node, nothing_held)
            return [result.token_ids for result in results]

        for lengths in LENGTHS:
            prompts = reference.prompts(lengths)
            expected = [reference.greedy(prompt, MAX_TOKENS).token_ids for prompt in prompts]
            assert asyncio.run(tokens(prompts)) == expected, str(lengths)
        for node in (prefill, decode):
            assert start.end(node) == 0


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_of_an_mtp_layer_change_no_token(*, graphs: bool, tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path, "deepseek-v3")
    reference = Reference(tmp_path)
    flags: Flags = {**NODE, **OWN, "model": tmp_path, "cuda_graphs": graphs, "speculation": "always"}
    with machines() as start:
        prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
        gateway = start.gateway([prefill], [decode], model=tmp_path, local_policy="strict")

        async def check(lengths: list[int]) -> None:
            prompts = reference.prompts(lengths)
            results = await asyncio.gather(*(generate(gateway, prompt, PARAMS) for prompt in prompts))
            for prompt, result in zip(prompts, results, strict=True):
                assert result.token_ids == reference.greedy(prompt, MAX_TOKENS).token_ids
                assert result.proof.drafted_tokens
            await until_status(decode, nothing_held)

        for lengths in LENGTHS:
            asyncio.run(check(lengths))
        for node in (prefill, decode):
            assert start.end(node) == 0
