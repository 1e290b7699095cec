"""Nodes whose ranks hold whole experts: the tokens are those of one process, prompts from either kind of node."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.expert_load import ExpertLoad, read_expert_load
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import DEADLINE_S, DEEPSEEK, Machines, status, until_status
from tests.integration.generation import generate
from tests.integration.reference import References
from tests.integration.test_metrics import scrape
from tests.integration.test_ranks import GREEDY, LENGTHS, MAX_TOKENS, NODE
from tests.integration.test_tokens import assert_same
from tests.warm import BATON, run_warm

MIXTURES, CHOICES = [1, 2, 3, 4], 2  # the model's layers with experts, and the experts of a token


@pytest.mark.slow
async def test_one_node_of_a_pair_may_have_whole_experts(start: Machines, references: References) -> None:
    flags = {**NODE, "model": DEEPSEEK, "tensor_parallel_size": 2}
    prefill, decode = start.nodes(("prefill", flags), ("decode", {**flags, "expert_parallel": True}))
    gateway = start.gateway([prefill], [decode], model=DEEPSEEK, local_policy="strict")
    reference = references[DEEPSEEK]
    prompts = reference.prompts(LENGTHS)
    results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"{len(prompt)} tokens")


def says(load: ExpertLoad, last: node_status_pb2.NodeStatus) -> bool:
    return tuple(last.expert_balance.rank_tokens) == load.rank_tokens


@pytest.mark.slow
async def test_nodes_with_redundant_experts_and_what_they_say_of_their_load(
    start: Machines, references: References, tmp_path: Path
) -> None:
    """The nodes that come later place their experts by the load of the first ones."""
    flags = {**NODE, "model": DEEPSEEK, "tensor_parallel_size": 2, "expert_parallel": True}
    prefill, decode = start.nodes(("prefill", flags), ("decode", {**flags, "redundant_experts": 3}))
    reference = references[DEEPSEEK]
    prompts = reference.prompts(LENGTHS)
    expected = {"prefill": sum(LENGTHS), "decode": len(LENGTHS) * (MAX_TOKENS - 1)}

    async def serve(prefill: Process, decode: Process) -> Process:
        gateway = start.gateway([prefill], [decode], model=DEEPSEEK, local_policy="strict")
        results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"{len(prompt)} tokens")
        return gateway

    gateway = await serve(prefill, decode)
    loads = {}
    for name, node in (("prefill", prefill), ("decode", decode)):
        file = tmp_path / f"{name}.json"
        finished = await asyncio.to_thread(run_warm, BATON, "expert-load", node.address, "--output", str(file))
        assert (finished.returncode, finished.stdout) == (0, ""), finished.stderr
        loads[name] = load = read_expert_load(file)
        assert list(load.tokens) == MIXTURES
        assert [sum(tokens) for tokens in load.tokens.values()] == [expected[name] * CHOICES] * len(MIXTURES)
        assert sum(load.rank_tokens) == expected[name] * CHOICES * len(MIXTURES)
        shown = await until_status(node, partial(says, load))
        assert 1.0 <= shown.expert_balance.imbalance_mean <= shown.expert_balance.imbalance_max <= 2.0
        page = scrape(node)
        for rank, tokens in enumerate(load.rank_tokens):
            assert page.value("baton_expert_tokens_total", rank=str(rank)) == tokens
        assert page.value("baton_expert_imbalance", layers="max") == shown.expert_balance.imbalance_max
    assert loads["decode"].redundant_experts == 3
    async with asyncio.timeout(DEADLINE_S), OperatorClient(gateway.address) as client:
        while not all(node.status.expert_balance.imbalance_max for node in (await client.cluster_status()).nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    listed = await asyncio.to_thread(run_warm, BATON, "status", "--target", gateway.address)
    assert " % a rank; busiest " in listed.stdout
    assert "; 3 redundant" in listed.stdout
    by_load = {**flags, "redundant_experts": 4, "expert_load": tmp_path / "prefill.json"}
    await serve(*start.nodes(("prefill", by_load), ("decode", by_load)))


@pytest.mark.slow
async def test_a_node_without_whole_experts_says_that_it_does_not_count_them(start: Machines) -> None:
    (node,) = start.nodes(("decode", {**NODE, "model": DEEPSEEK}))
    assert not (await status(node)).HasField("expert_balance")
    finished = await asyncio.to_thread(run_warm, BATON, "expert-load", node.address)
    assert finished.returncode == 1
    assert "this node does not count the tokens of experts" in finished.stderr
