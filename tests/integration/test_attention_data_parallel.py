"""Nodes whose ranks have requests of their own: the tokens are those of one process, with any kind of node on the other
side, and each rank holds only its own requests' KV."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import (
    DEADLINE_S,
    DEEPSEEK,
    Machines,
    machines,
    nothing_held,
    status,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.reference import References
from tests.integration.test_ranks import GREEDY, LENGTHS, MAX_TOKENS, NODE, until_all_in, until_gone, workers_of
from tests.integration.test_tokens import assert_same, bytes_per_token

OWN = {"tensor_parallel_size": 2, "expert_parallel": True, "attention_data_parallel": True}
# By the names of kinds of nodes; `copies` is how many ranks get each request's KV.
KINDS = {"one": {}, "split": {"tensor_parallel_size": 2}, "own": OWN}
COPIES = {"one": 1, "split": 2, "own": 1}
PAIRS = [("one", "own"), ("own", "one"), ("own", "own"), ("split", "own"), ("own", "split")]


@dataclass(frozen=True)
class Cluster:
    """A prefill and a decode node of each kind."""

    start: Machines
    prefill: dict[str, Process]
    decode: dict[str, Process]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with machines() as start:
        wanted = [(role, kind) for role in ("prefill", "decode") for kind in KINDS]
        nodes = start.nodes(*((role, {**NODE, "model": DEEPSEEK, **KINDS[kind]}) for role, kind in wanted))
        found = dict(zip(wanted, nodes, strict=True))
        yield Cluster(
            start, {kind: found["prefill", kind] for kind in KINDS}, {kind: found["decode", kind] for kind in KINDS}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
async def test_prompts_go_to_and_from_the_ranks_that_own_them(
    cluster: Cluster, references: References, sender: str, receiver: str
) -> None:
    prefill, decode = cluster.prefill[sender], cluster.decode[receiver]
    reference = references[DEEPSEEK]
    gateway = cluster.start.gateway([prefill], [decode], model=DEEPSEEK, local_policy="strict")
    prompts = reference.prompts([*LENGTHS, 33])
    results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(result, reference.greedy(prompt, MAX_TOKENS), f"{sender} to {receiver}, {len(prompt)} tokens")
        receipt = result.proof
        assert receipt.path is RequestPath.REMOTE
        assert receipt.bytes_sent == len(prompt) * bytes_per_token(DEEPSEEK) * COPIES[receiver]
        assert receipt.transport not in ("", "loopback")
    cluster.start.end(gateway)
    for node in (prefill, decode):
        last = await until_status(node, nothing_held)
        assert last.segments_refused == last.segments_late == 0


@pytest.mark.slow
async def test_a_node_of_two_such_ranks_has_room_for_twice_the_kv(cluster: Cluster) -> None:
    one, own = [(await status(cluster.decode[kind])).blocks_total for kind in ("split", "own")]
    assert own == 2 * one


@pytest.mark.slow
async def test_a_prompt_goes_to_the_rank_that_has_its_prefix(start: Machines, references: References) -> None:
    """On both nodes, so that only the rest is computed and sent."""
    flags = {**NODE, **OWN, "model": DEEPSEEK, "prefix_cache": True}
    prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
    gateway = start.gateway([prefill], [decode], model=DEEPSEEK, local_policy="strict")
    reference = references[DEEPSEEK]
    firsts = reference.prompts([96, 112])
    for prompt in firsts:
        assert_same(await generate(gateway, prompt, GREEDY), reference.greedy(prompt, MAX_TOKENS), "first")
    for first in firsts:
        prompt = [*first, *range(40, 80)]
        result = await generate(gateway, prompt, GREEDY)
        assert_same(result, reference.greedy(prompt, MAX_TOKENS), "continued")
        assert result.proof.prompt_tokens_sent == len(prompt) - len(first)
    for node in (prefill, decode):
        last = await until_status(node, nothing_held)
        assert last.segments_refused == 0


@pytest.mark.slow
async def test_a_rank_that_dies_ends_its_node_and_its_requests_continue_elsewhere(
    start: Machines, references: References
) -> None:
    flags = {**NODE, "model": DEEPSEEK, "max_batch_tokens": 16}
    reference = references[DEEPSEEK]
    prompts = reference.prompts([50, 60, 70, 80])
    long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    owned, single = start.nodes(("decode", {**flags, **OWN}), ("decode", flags), paused_engine=["decode"])
    gateway = start.gateway([], [owned, single], model=DEEPSEEK, local_policy="local")
    results = [Result() for _ in prompts]
    requests = [
        asyncio.create_task(generate(gateway, prompt, long, result=result))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    await until_all_in([owned, single], len(prompts))
    start.allow_steps(30, owned, single)
    for result in results:
        await result.until_tokens(3)
    assert (await status(owned)).requests_running > 0
    (worker,) = workers_of(owned)
    os.kill(worker, signal.SIGKILL)
    start.let_go(single)
    await asyncio.gather(*requests)
    assert await asyncio.to_thread(owned.popen.wait, DEADLINE_S) == 1
    until_gone([worker])
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == reference.greedy(prompt, 40).token_ids
    await until_status(single, nothing_held)
