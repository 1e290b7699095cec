"""Nodes whose ranks hold whole experts: the tokens are those of one process, prompts from either kind of node."""

import asyncio

import pytest

from tests.integration.cluster import DEEPSEEK, Machines
from tests.integration.generation import generate
from tests.integration.reference import References
from tests.integration.test_ranks import GREEDY, LENGTHS, MAX_TOKENS, NODE
from tests.integration.test_tokens import assert_same


@pytest.mark.slow
async def test_a_pair_of_nodes_of_which_one_has_whole_experts(start: Machines, references: References) -> None:
    flags = {**NODE, "model": DEEPSEEK, "tensor_parallel_size": 2}
    prefill, decode = start.nodes(("prefill", flags), ("decode", {**flags, "expert_parallel": True}))
    gateway = start.gateway([prefill], [decode], model=DEEPSEEK, local_policy="strict")
    reference = references[DEEPSEEK]
    prompts = reference.prompts(LENGTHS)
    results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"{len(prompt)} tokens")
