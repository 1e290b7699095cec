"""Whatever fails and when (design, section 3): exact tokens or one typed error, and nothing held afterwards."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from baton.cli.processes import Process
from baton.errors import Cancelled, DeadlineExceeded, Draining, NoNode, Overloaded
from baton.rpc.server import connect
from baton.types import Path as RequestPath
from baton.types import SamplingParams
from protos.baton.v1 import common_pb2
from protos.baton.v1 import generation_pb2 as pb
from protos.baton.v1.generation_pb2_grpc import GenerationStub
from tests.integration.cluster import DEEPSEEK, LLAMA, Machines, machines, nothing_held, status, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference

# 16 tokens a step: a prompt of 600 takes 38 steps, time enough to do something to it.
SLOW = {"model": LLAMA, "max_batch_tokens": 16, "num_blocks": 256, "keepalive_s": 2, "prefix_cache": False}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
RELEASE_BOUND_S = 3.0


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(LLAMA)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    return reference.prompts([600] * 12)


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as each:
        yield each


async def until_prefilling(node: Process) -> None:
    """Returns when the node has computed part of a prompt, and not all of it."""
    await until_status(node, lambda last: last.requests_running > 0 and 0 < last.tokens_waiting < 500)


async def until_decoding(node: Process) -> None:
    await until_status(node, lambda last: last.requests_running > 0 and last.blocks_leased == 0)


async def first_of(condition: Callable[[Process], Coroutine[Any, Any, None]], *nodes: Process) -> Process:
    """The node for which the condition holds first."""
    waits = {asyncio.create_task(condition(node)): node for node in nodes}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    task = done.pop()
    await task
    return waits[task]


async def until_released(*nodes: Process) -> None:
    for node in nodes:
        await until_status(node, nothing_held, within_s=RELEASE_BOUND_S)


# ---- prefill nodes


async def test_a_prefill_node_killed_in_the_middle_is_replaced_by_another(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    first, second, decode = start.nodes(("prefill", SLOW), ("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([first, second], [decode], model=LLAMA, local_policy="strict")
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    busy = await first_of(until_prefilling, first, second)
    start.kill(busy)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE
    assert result.proof.attempts == 2
    await until_released(decode, second if busy is first else first)


async def test_the_last_prefill_node_killed_in_the_middle_is_replaced_by_the_decode_node(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(prefill)
    start.kill(prefill)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.LOCAL
    assert result.proof.why
    await until_released(decode)
    # Before the hand-over: the next request finds no prefill node.
    again = await generate(gateway, prompts[1], GREEDY)
    assert again.token_ids == reference.greedy(prompts[1], 12).token_ids
    assert again.proof.path is RequestPath.LOCAL
    await until_released(decode)


async def test_without_a_prefill_node_the_strict_policy_gives_an_error(
    start: Machines, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(prefill)
    start.kill(prefill)
    with pytest.raises(NoNode):
        await request
    await until_released(decode)


async def test_a_frozen_prefill_node_is_replaced_and_may_come_back(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA, prefill_stall_s=1)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(prefill)
    start.freeze(prefill)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.LOCAL
    await until_released(decode)
    start.thaw(prefill)
    await until_status(prefill, nothing_held, within_s=10)
    await until_remote(gateway, prompts[1:], reference)
    await until_released(prefill, decode)


async def until_remote(gateway: Process, prompts: list[list[int]], reference: Reference) -> None:
    """Every answer is right, and one of the next ones goes over a prefill node again."""
    for prompt in prompts:
        result = await generate(gateway, prompt, GREEDY)
        assert result.token_ids == reference.greedy(prompt, 12).token_ids
        if result.proof.path is RequestPath.REMOTE:
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no request was prefilled remotely any more")


async def test_a_restarted_prefill_node_is_another_peer(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    before = (await status(prefill)).info.incarnation
    start.kill(prefill)
    (again,) = start.nodes(("prefill", {**SLOW, "listen": prefill.address}))
    assert (await status(again)).info.incarnation != before
    await until_remote(gateway, prompts, reference)
    await until_released(again, decode)


# ---- decode nodes


async def test_a_decode_node_killed_while_decoding_is_continued_elsewhere(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, first, second = start.nodes(("prefill", SLOW), ("decode", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [first, second], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], LONG))
    killed = await first_of(until_decoding, first, second)
    start.kill(killed)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], LONG.max_tokens).token_ids
    await until_released(prefill, second if killed is first else first)


# ---- gateways


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_killed_gateways_requests_are_released(start: Machines, prompts: list[list[int]], phase: str) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], LONG))
    await (until_prefilling(prefill) if phase == "prefill" else until_decoding(decode))
    start.kill(gateway)
    with pytest.raises(NoNode):
        await request
    await until_released(prefill, decode)


# ---- clients


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[Machines, Process, Process, Process]]:
    """A cluster for tests that leave it as it was."""
    with machines() as each:
        prefill, decode = each.nodes(("prefill", SLOW), ("decode", SLOW))
        yield each, prefill, decode, each.gateway([prefill], [decode], model=LLAMA, queue_s=20)


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
async def test_cancelling_releases_both_nodes(
    calm: tuple[Machines, Process, Process, Process], prompts: list[list[int]], phase: str
) -> None:
    _, prefill, decode, gateway = calm
    others = []
    if phase == "queue":
        # 256 blocks of 16: six prompts of 38 blocks fill the decode node.
        others = [asyncio.create_task(generate(gateway, prompt, LONG)) for prompt in prompts[1:7]]
        await until_status(decode, lambda last: last.requests_waiting > 0 or last.blocks_leased > 200)
    request = asyncio.create_task(generate(gateway, prompts[0], LONG))
    if phase == "prefill":
        await until_prefilling(prefill)
    elif phase == "decode":
        await until_decoding(decode)
    else:
        await until_status(decode, lambda last: last.requests_waiting > 0)
    for each in (request, *others):
        each.cancel()
    await asyncio.wait([request, *others])
    await until_released(prefill, decode)


@pytest.mark.parametrize("timeout_s", [0.001, 0.3, 1.5])
async def test_a_deadline_ends_the_request_in_whatever_phase(
    calm: tuple[Machines, Process, Process, Process], prompts: list[list[int]], timeout_s: float
) -> None:
    _, prefill, decode, gateway = calm
    params = SamplingParams(max_tokens=3000, temperature=0.0, ignore_eos=True)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await generate(gateway, prompts[0], params, timeout_s=timeout_s)
    assert time.monotonic() - began < timeout_s + 1.0
    await until_released(prefill, decode)


async def test_a_full_decode_node_refuses_with_a_retry_hint(start: Machines, prompts: list[list[int]]) -> None:
    tight = {**SLOW, "num_blocks": 50}
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", tight))
    gateway = start.gateway([prefill], [decode], model=LLAMA, queue_s=0)
    first = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_status(decode, lambda last: last.blocks_leased > 0)
    with pytest.raises(Overloaded) as caught:
        await generate(gateway, prompts[1], GREEDY)
    assert caught.value.retry_after_s is not None
    assert len((await first).token_ids) == 12
    await until_released(prefill, decode)


async def test_a_full_decode_node_serves_in_order_within_the_queue_time(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    tight = {**SLOW, "num_blocks": 50}
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", tight))
    gateway = start.gateway([prefill], [decode], model=LLAMA, queue_s=60)
    results = await asyncio.gather(*(generate(gateway, prompt, GREEDY) for prompt in prompts[:3]))
    for prompt, result in zip(prompts, results, strict=False):
        assert result.token_ids == reference.greedy(prompt, 12).token_ids
    assert max(result.proof.queue_s for result in results) > 0.05
    await until_released(prefill, decode)


# ---- pairs and drains


async def test_nodes_that_cannot_work_together_are_refused_before_traffic(
    start: Machines, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", {**SLOW, "model": DEEPSEEK}), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="prefer")
    refused = await until_status(
        prefill, lambda last: any(peer.phase == common_pb2.PEER_PHASE_REFUSED for peer in last.peers)
    )
    fields = {mismatch.field for mismatch in refused.peers[0].mismatches}
    assert {"architecture", "config_digest", "weights_digest", "kind"} <= fields
    theirs = await until_status(decode, lambda last: len(last.peers) > 0)
    assert theirs.peers[0].phase == common_pb2.PEER_PHASE_REFUSED
    async with connect(gateway.address) as channel:
        seen = await GenerationStub(channel).ClusterStatus(pb.ClusterStatusRequest())
    assert any(peer.mismatches for node in seen.nodes for peer in node.status.peers)
    result = await generate(gateway, prompts[0], GREEDY)
    assert result.proof.path is RequestPath.LOCAL


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
async def test_draining_finishes_what_runs_and_exits_with_0(
    start: Machines, reference: Reference, prompts: list[list[int]], role: str
) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(prefill)
    draining = {"prefill": prefill, "decode": decode, "gateway": gateway}[role]
    code = await asyncio.to_thread(start.end, draining)
    result = await request
    assert code == 0
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE
    if role != "gateway":
        await until_released(*({prefill, decode} - {draining}))


async def test_a_draining_gateway_refuses_new_requests(start: Machines, prompts: list[list[int]]) -> None:
    prefill, decode = start.nodes(("prefill", SLOW), ("decode", SLOW))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(prefill)
    ending = asyncio.create_task(asyncio.to_thread(start.end, gateway))
    await asyncio.sleep(0.1)
    with pytest.raises((Draining, NoNode)):
        await generate(gateway, prompts[1], GREEDY)
    await request
    assert await ending == 0


async def test_a_drained_decode_node_out_of_time_hands_its_requests_over(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    short = {**SLOW, "drain_grace_s": 0.2}
    prefill, first, second = start.nodes(("prefill", SLOW), ("decode", short), ("decode", short))
    gateway = start.gateway([prefill], [first, second], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], LONG))
    drained = await first_of(until_decoding, first, second)
    assert await asyncio.to_thread(start.end, drained) == 0
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], LONG.max_tokens).token_ids
    await until_released(prefill, second if drained is first else first)


async def test_cancelled_is_what_a_cancelling_client_sees(
    calm: tuple[Machines, Process, Process, Process], prompts: list[list[int]]
) -> None:
    _, prefill, decode, gateway = calm
    async with connect(gateway.address) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompts[0]))
        call = GenerationStub(channel).Generate(request)
        await until_prefilling(prefill)
        call.cancel()
        assert (await call.code()).name == "CANCELLED"
    assert Cancelled.reason == "CANCELLED"
    await until_released(prefill, decode)
