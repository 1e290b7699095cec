"""This version and the pinned one side by side: they share the wire to clients, and say why they share no cluster."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import pytest

from baton.cli.processes import Process, Processes
from baton.client.operators import OperatorClient
from baton.core.errors import NoNode, PeerRefused
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.rpc.channels import connect
from baton.rpc.describe import describe
from baton.rpc.status import from_rpc_error
from tests.integration.cluster import (
    DEADLINE_S,
    LLAMA,
    Flags,
    Machines,
    arguments,
    machines,
)
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference
from tests.interop.release import launch_release

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NODE: Flags = {"model": LLAMA, "num_blocks": 256, "device": "cpu", "prefix_cache": False, "drain_grace_s": 600}
STRICT: dict[str, Any] = {"model": LLAMA, "local_policy": "strict"}


class Pair(NamedTuple):
    prefill: Process
    decode: Process


class Mixed(NamedTuple):
    start: Machines
    release: Processes
    old: Pair


@contextmanager
def release() -> Iterator[Processes]:
    with Processes(report=lambda line: None, launch=launch_release) as processes:
        yield processes


@pytest.fixture(scope="module")
def mixed() -> Iterator[Mixed]:
    with release() as processes, machines() as start:
        old = [
            processes.start(f"{role}_node", arguments({"name": f"old-{role}", **NODE}))
            for role in ("prefill", "decode")
        ]
        processes.wait_ready(old)
        yield Mixed(start, processes, Pair(*old))


def old_gateway(mixed: Mixed, prefill: Sequence[Process], decode: Sequence[Process]) -> Process:
    joined = {
        "prefill": ",".join(node.address for node in prefill),
        "decode": ",".join(node.address for node in decode),
    }
    return mixed.release.start("gateway", arguments({**joined, **STRICT}))


async def answered(gateway: Process, prompt: Sequence[int]) -> Result:
    """An older gateway is ready 5 s after its nodes, whether they are paired or not; until then it refuses requests."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                return await generate(gateway, prompt, GREEDY)
            except NoNode:
                await asyncio.sleep(0.05)


async def test_this_client_gets_the_answers_of_an_older_cluster(mixed: Mixed, reference: Reference) -> None:
    gateway = old_gateway(mixed, [mixed.old.prefill], [mixed.old.decode])
    mixed.release.wait_ready([gateway])
    (prompt,) = reference.prompts([150])
    result = await answered(gateway, prompt)
    assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    assert result.proof.path is Path.REMOTE
    assert result.proof.ttft_s > 0


async def test_this_gateway_says_why_it_cannot_use_older_nodes(mixed: Mixed) -> None:
    nodes = [mixed.old.prefill], [mixed.old.decode]
    gateway = mixed.start.gateway(*nodes, wait=False, model=LLAMA, local_policy="strict", failover_wait_s=0)
    async with OperatorClient(gateway.address) as client, asyncio.timeout(DEADLINE_S):
        while True:
            if sum("docs/upgrades.md" in detail for detail in await details(client)) == len(mixed.old):
                break
            await asyncio.sleep(0.05)


async def details(client: OperatorClient) -> list[str]:
    """What the gateway says of each node. Empty while it starts: its port is bound, and nothing answers there yet."""
    try:
        return [node.detail for node in (await client.cluster_status()).nodes]
    except NoNode:
        return []


async def test_this_node_tells_an_older_process_what_to_do(mixed: Mixed) -> None:
    (node,) = mixed.start.nodes(("decode", NODE))
    async with connect(node.address) as channel:
        untyped: Any = channel
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await untyped.unary_unary("/baton.v1.Node/Describe")(b"")
    error = from_rpc_error(refused.value)
    assert isinstance(error, PeerRefused)
    assert "docs/upgrades.md" in error.cure


async def test_asking_an_older_node_says_that_it_is_of_another_release(mixed: Mixed) -> None:
    with pytest.raises(NoNode, match=r"docs/upgrades\.md"):
        await describe(mixed.old.decode.address)
