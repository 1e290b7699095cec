"""Links between processes break or fall silent; no request fails as long as another way, or time, is left."""

import asyncio
from copy import copy

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.protos.v1 import operations_pb2 as pb
from baton.protos.v1.operations_pb2_grpc import OperationsStub
from baton.rpc.channels import connect
from tests.integration.cluster import (
    DEADLINE_S,
    LLAMA,
    Flags,
    Machines,
    first_of,
    in_engine,
    nothing_held,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.proxy import Proxy, free_address
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "max_batch_tokens": 16, "num_blocks": 256, "prefix_cache": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
REQUESTS = 6


@pytest.fixture
def prompts(reference: Reference) -> list[list[int]]:
    return reference.prompts([80 + 10 * number for number in range(REQUESTS)])


async def test_a_reset_between_the_only_prefill_and_decode_node_fails_no_strict_request(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    address = free_address()
    with Proxy(address) as proxy:
        prefill, decode = start.nodes(
            ("prefill", NODE),
            ("decode", {**NODE, "listen": address, "advertise": proxy.address}),
            paused_engine=["prefill"],
        )
        gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
        requests = [asyncio.create_task(generate(gateway, prompt, GREEDY)) for prompt in prompts]
        await until_status(prefill, lambda last: in_engine(last) == REQUESTS)
        start.allow_steps(2, prefill)
        await until_status(prefill, lambda last: last.requests_running > 0)
        proxy.reset()
        start.let_go(prefill)
        results = await asyncio.gather(*requests)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
            assert result.proof.path is RequestPath.REMOTE
            assert result.proof.attempts > 1
        await until_status(prefill, nothing_held)
        await until_status(decode, nothing_held)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_of_a_node_behind_a_cut_link_go_on_elsewhere_and_it_may_come_back(
    start: Machines, reference: Reference, prompts: list[list[int]], role: str
) -> None:
    # Every other limit on silence is longer than this test may take. On a busy machine this one may end connections of
    # nodes that are not behind a cut link, and the request is then on the other node.
    first, second, other = start.nodes(
        (role, NODE), (role, NODE), ("decode" if role == "prefill" else "prefill", NODE), paused_engine=[role]
    )
    with Proxy(first.address) as to_first, Proxy(second.address) as to_second:
        behind = {first: to_first, second: to_second}
        pairs = {role: [seen_as(node, proxy) for node, proxy in behind.items()]}
        gateway = start.gateway(
            pairs.get("prefill", [other]),
            pairs.get("decode", [other]),
            model=LLAMA,
            local_policy="strict",
            keepalive_s=2.0,
            failover_wait_s=DEADLINE_S,
        )
        result = Result()
        request = asyncio.create_task(generate(gateway, prompts[0], GREEDY, result=result))
        if role == "decode":
            start.allow_steps(3, first, second)
            await result.until_tokens(3)
        busy = await first_of(lambda node: until_status(node, lambda last: in_engine(last) > 0), [first, second])
        behind[busy].cut()
        start.let_go(second if busy is first else first)
        await request
        assert result.token_ids == reference.greedy(prompts[0], GREEDY.resolved().max_tokens).token_ids
        behind[busy].mend()
        start.let_go(busy)
        for node in (first, second, other):
            await until_status(node, nothing_held)
        await until_all_reachable(gateway, 3)


def seen_as(node: Process, proxy: Proxy) -> Process:
    """The node at the proxy's address."""
    seen = copy(node)
    seen.address = proxy.address
    return seen


async def until_all_reachable(gateway: Process, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S), connect(gateway.address) as channel:
        stub = OperationsStub(channel)
        while True:
            seen = await stub.ClusterStatus(pb.ClusterStatusRequest())
            if sum(node.reachable for node in seen.nodes) == count:
                return
            await asyncio.sleep(0.05)
