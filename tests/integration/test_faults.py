"""Any fault at any time (design, section 3): exact tokens or one typed error, and all blocks and leases are free
afterwards.

Engines are paused in the state that a test names. A paused request cannot finish, so only the tested way out frees its
blocks.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from baton.cli.processes import Process
from baton.core.errors import Cancelled, DeadlineExceeded, Draining, NoNode, Overloaded
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.protos.v1 import generation_pb2 as pb
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.protos.v1.generation_pb2_grpc import GenerationStub
from baton.protos.v1.operations_pb2_grpc import OperationsStub
from baton.rpc.channels import connect
from tests.damaged_weights import zero
from tests.integration.cluster import (
    DEADLINE_S,
    DEEPSEEK,
    LLAMA,
    Flags,
    Machines,
    first_of,
    machines,
    nothing_held,
    status,
    until_status,
)
from tests.integration.generation import Result, generate
from tests.integration.proxy import free_address
from tests.integration.reference import Reference

STEP_TOKENS = 16
PROMPT_TOKENS = 600
# Half a prompt, and some tokens of an output.
PREFILL_STEPS, DECODE_STEPS = 19, 5
PROMPT_STEPS = -(-PROMPT_TOKENS // STEP_TOKENS)
NODE: Flags = {"model": LLAMA, "max_batch_tokens": STEP_TOKENS, "num_blocks": 256, "prefix_cache": False}
# Room for one prompt.
TIGHT: Flags = {**NODE, "num_blocks": 50}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PHASES = ["prefill", "decode"]


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    return reference.prompts([PROMPT_TOKENS] * 12)


async def until_prefilling(start: Machines, *nodes: Process) -> Process:
    """Lets one of these held nodes compute a part of a prompt, at most half; returns that node."""
    start.allow_steps(PREFILL_STEPS, *nodes)
    return await first_of(lambda node: until_status(node, computes_a_prompt), nodes)


def computes_a_prompt(last: node_status_pb2.NodeStatus) -> bool:
    """A call that was cancelled before may have come late and have taken some of the steps."""
    return last.requests_running == 1 and 0 < last.tokens_waiting < PROMPT_TOKENS


async def until_decoding(start: Machines, result: Result, *nodes: Process) -> Process:
    """Lets one of these held nodes decode some tokens of the request; returns that node."""
    start.allow_steps(DECODE_STEPS, *nodes)
    await result.until_tokens(1 + DECODE_STEPS)  # the first one is the prefill node's
    return await first_of(lambda node: until_status(node, lambda last: last.requests_running > 0), nodes)


async def until_released(*nodes: Process) -> None:
    for node in nodes:
        await until_status(node, nothing_held)


# ---- prefill nodes


async def test_a_prefill_node_killed_in_the_middle_is_replaced_by_another(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    first, second, decode = start.nodes(
        ("prefill", NODE), ("prefill", NODE), ("decode", NODE), paused_engine=["prefill"]
    )
    gateway = start.gateway([first, second], [decode], model=LLAMA, local_policy="strict")
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    busy = await until_prefilling(start, first, second)
    start.kill(busy)
    other = second if busy is first else first
    start.let_go(other)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE
    assert result.proof.attempts == 2
    await until_released(decode, other)


async def test_the_last_prefill_node_killed_in_the_middle_is_replaced_by_the_decode_node(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(start, prefill)
    start.kill(prefill)
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.LOCAL
    assert result.proof.why
    await until_released(decode)
    # The next request finds no prefill node from its start.
    again = await generate(gateway, prompts[1], GREEDY)
    assert again.token_ids == reference.greedy(prompts[1], 12).token_ids
    assert again.proof.path is RequestPath.LOCAL
    await until_released(decode)


async def test_the_strict_policy_gives_an_error_if_no_prefill_node_comes_back_in_time(
    start: Machines, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict", failover_wait_s=0.2)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(start, prefill)
    start.kill(prefill)
    with pytest.raises(NoNode):
        await request
    await until_released(decode)


async def test_a_frozen_prefill_node_is_replaced_and_may_come_back(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    # On a slow machine these limits may end other waits too: then a request takes more attempts, with the same result.
    limits = {"keepalive_s": 2}
    prefill, decode = start.nodes(
        ("prefill", {**NODE, **limits}), ("decode", {**NODE, **limits}), paused_engine=["prefill"]
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, prefill_stall_s=2)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    reached = asyncio.create_task(until_prefilling(start, prefill))
    await asyncio.wait([reached, request], return_when=asyncio.FIRST_COMPLETED)
    start.freeze(prefill)
    result = await request
    reached.cancel()
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.LOCAL
    await until_released(decode)
    start.thaw(prefill)
    await until_released(prefill)
    start.let_go(prefill)
    await until_remote(gateway, prompts[1], reference)
    await until_released(prefill, decode)


async def test_a_prefill_node_that_answers_and_computes_nothing_is_replaced(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA, prefill_stall_s=2)
    result = await generate(gateway, prompts[0], GREEDY)
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.LOCAL
    start.let_go(prefill)
    await until_released(prefill, decode)


async def until_remote(gateway: Process, prompt: list[int], reference: Reference) -> None:
    """Every answer is right, and after some time one comes from a prefill node again."""
    expected = reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    async with asyncio.timeout(DEADLINE_S):
        while True:
            result = await generate(gateway, prompt, GREEDY)
            assert result.token_ids == expected
            if result.proof.path is RequestPath.REMOTE:
                return


async def test_a_new_strict_request_waits_while_the_only_prefill_node_restarts(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    lasting = {**NODE, "listen": free_address()}
    prefill, decode = start.nodes(("prefill", lasting), ("decode", NODE))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict", failover_wait_s=DEADLINE_S)
    assert await asyncio.to_thread(start.end, prefill) == 0
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    (again,) = await asyncio.to_thread(start.nodes, ("prefill", lasting))
    result = await request
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE
    await until_released(again, decode)


async def test_a_restarted_prefill_node_is_another_peer(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    lasting = {**NODE, "listen": free_address()}
    prefill, decode = start.nodes(("prefill", lasting), ("decode", NODE))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    before = (await status(prefill)).info.incarnation
    start.kill(prefill)
    (again,) = start.nodes(("prefill", lasting))
    assert (await status(again)).info.incarnation != before
    await until_remote(gateway, prompts[0], reference)
    await until_released(again, decode)


# ---- decode nodes


async def test_a_decode_node_killed_while_decoding_is_continued_elsewhere(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, first, second = start.nodes(
        ("prefill", NODE), ("decode", NODE), ("decode", NODE), paused_engine=["decode"]
    )
    gateway = start.gateway([prefill], [first, second], model=LLAMA)
    result = Result()
    request = asyncio.create_task(generate(gateway, prompts[0], LONG, result=result))
    killed = await until_decoding(start, result, first, second)
    start.kill(killed)
    other = second if killed is first else first
    start.let_go(other)
    await request
    assert result.token_ids == reference.greedy(prompts[0], LONG.resolved().max_tokens).token_ids
    await until_released(prefill, other)


# ---- gateways


@pytest.mark.parametrize("phase", PHASES)
async def test_a_killed_gateways_requests_are_released(start: Machines, prompts: list[list[int]], phase: str) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=[phase])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    result = Result()
    request = asyncio.create_task(generate(gateway, prompts[0], LONG, result=result))
    await (until_prefilling(start, prefill) if phase == "prefill" else until_decoding(start, result, decode))
    start.kill(gateway)
    with pytest.raises(NoNode):
        await request
    await until_released(prefill, decode)


# ---- clients


@dataclass(frozen=True)
class Calm:
    """A cluster for tests that do not change it."""

    start: Machines
    prefill: Process
    decode: Process
    gateway: Process

    def hold(self, role: str) -> None:
        """Holds only the node of this role."""
        held, free = (self.prefill, self.decode) if role == "prefill" else (self.decode, self.prefill)
        self.start.let_go(free)
        self.start.allow_steps(0, held)


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    with machines() as start:
        prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill", "decode"])
        yield Calm(start, prefill, decode, start.gateway([prefill], [decode], model=LLAMA))


@pytest.mark.parametrize("phase", ["queue", *PHASES])
async def test_cancelling_releases_both_nodes(calm: Calm, prompts: list[list[int]], phase: str) -> None:
    calm.hold("decode" if phase == "decode" else "prefill")
    others = []
    if phase == "queue":
        # 256 blocks of 16: six prompts of 38 blocks fill the decode node.
        others = [asyncio.create_task(generate(calm.gateway, prompt, LONG)) for prompt in prompts[1:7]]
        await until_status(calm.decode, lambda last: last.requests_waiting > 0 or last.blocks_leased > 200)
        # A call that came later would take steps from the next test.
        await until_status(calm.prefill, lambda last: last.requests_running + last.requests_waiting == len(others))
    result = Result()
    request = asyncio.create_task(generate(calm.gateway, prompts[0], LONG, result=result))
    if phase == "prefill":
        await until_prefilling(calm.start, calm.prefill)
    elif phase == "decode":
        await until_decoding(calm.start, result, calm.decode)
    else:
        await until_status(calm.decode, lambda last: last.requests_waiting > 0)
        # It leaves before the others do: otherwise it could get their blocks, and its prefill call come late.
        request.cancel()
        await until_status(calm.decode, lambda last: last.requests_waiting == 0)
    for each in (request, *others):
        each.cancel()
    await asyncio.wait([request, *others])
    await until_released(calm.prefill, calm.decode)


@pytest.mark.parametrize(("phase", "timeout_s"), [("prefill", 0.001), ("prefill", 1.0), ("decode", 1.5)])
async def test_a_deadline_ends_the_request_in_any_phase(
    calm: Calm, prompts: list[list[int]], phase: str, timeout_s: float
) -> None:
    """Holding the node fixes the phase, if the request reaches it before its deadline. A new gateway has not seen held
    nodes, from which another one concludes that there is no time."""
    gateway = calm.start.gateway([calm.prefill], [calm.decode], model=LLAMA)
    calm.hold(phase)
    with pytest.raises(DeadlineExceeded):
        await generate(gateway, prompts[0], LONG, timeout_s=timeout_s)
    await until_released(calm.prefill, calm.decode)


async def test_a_cancelling_client_gets_cancelled(calm: Calm, prompts: list[list[int]]) -> None:
    calm.hold("prefill")
    async with connect(calm.gateway.address) as channel:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompts[0]))
        call = GenerationStub(channel).Generate(request)
        await until_prefilling(calm.start, calm.prefill)
        call.cancel()
        assert (await call.code()).name == "CANCELLED"
    assert Cancelled.reason == "CANCELLED"
    await until_released(calm.prefill, calm.decode)


async def test_a_full_decode_node_refuses_with_a_retry_hint(start: Machines, prompts: list[list[int]]) -> None:
    prefill, decode = start.nodes(
        ("prefill", {**NODE, "also_decodes": "false"}), ("decode", TIGHT), paused_engine=["prefill"]
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, max_queue_s=0)
    first = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_status(decode, lambda last: last.blocks_leased > 0)
    with pytest.raises(Overloaded) as caught:
        await generate(gateway, prompts[1], GREEDY)
    assert caught.value.retry_after_s is not None
    start.let_go(prefill)
    assert len((await first).token_ids) == 12
    await until_released(prefill, decode)


def room_taken(last: node_status_pb2.NodeStatus, *, waiting: int) -> bool:
    return last.blocks_leased > 0 and last.requests_waiting == waiting


async def test_a_full_decode_node_serves_in_order_within_the_queue_time(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", TIGHT), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    finished: list[int] = []

    async def serve(index: int) -> Result:
        result = await generate(gateway, prompts[index], GREEDY)
        finished.append(index)
        return result

    requests = []
    for index in range(3):  # the first one has the blocks, the others wait for them
        requests.append(asyncio.create_task(serve(index)))
        await until_status(decode, partial(room_taken, waiting=index))
    for count in range(1, 4):
        start.allow_steps(PROMPT_STEPS, prefill)  # one prompt at a time
        await asyncio.wait(requests[count - 1 :], return_when=asyncio.FIRST_COMPLETED)
        assert finished == [0, 1, 2][:count]
    results = await asyncio.gather(*requests)
    for prompt, result in zip(prompts, results, strict=False):
        assert result.token_ids == reference.greedy(prompt, 12).token_ids
    assert all(result.proof.queue_s > 0 for result in results[1:])
    await until_released(prefill, decode)


# ---- pairs and drains


async def until_seen(gateway: Process, condition: Callable[[operations_pb2.NodeReport], bool]) -> None:
    """Returns when the gateway reports such a node."""
    async with asyncio.timeout(DEADLINE_S), connect(gateway.address) as channel:
        stub = OperationsStub(channel)
        while True:
            seen = await stub.ClusterStatus(operations_pb2.ClusterStatusRequest())
            if any(map(condition, seen.nodes)):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("num_bytes", "share"), [(64 << 10, 0.5), (1, 0.4), (8, 0.9)])
async def test_a_damaged_copy_of_the_weights_is_refused_before_traffic(
    start: Machines,
    reference: Reference,
    prompts: list[list[int]],
    tmp_path: Path,
    num_bytes: int,
    share: float,
) -> None:
    damaged = tmp_path / "llama"
    shutil.copytree(LLAMA, damaged)
    zero(damaged, num_bytes=num_bytes, share=share)
    prefill, decode = start.nodes(("prefill", {**NODE, "model": damaged}), ("decode", NODE))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="prefer")
    for node in (prefill, decode):
        refused = await until_status(node, lambda last: any(peer.mismatches for peer in last.peers))
        (mismatch,) = refused.peers[0].mismatches
        assert mismatch.field == "content_digest"
        assert "damaged" in mismatch.cure
    result = await generate(gateway, prompts[0], GREEDY)
    assert (result.proof.path, result.token_ids) == (RequestPath.LOCAL, reference.greedy(prompts[0], 12).token_ids)
    # If its status was the first, the gateway finds the difference with its next one.
    await until_seen(
        gateway,
        lambda node: node.address == prefill.address and "weights differ in some bytes from those of" in node.detail,
    )


async def test_nodes_that_cannot_work_together_are_refused_before_traffic(
    start: Machines, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", {**NODE, "model": DEEPSEEK}), ("decode", NODE))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="prefer")

    def refuses(last: node_status_pb2.NodeStatus) -> bool:
        return any(peer.phase == node_status_pb2.PEER_PHASE_REFUSED for peer in last.peers)

    refused = await until_status(prefill, refuses)
    fields = {mismatch.field for mismatch in refused.peers[0].mismatches}
    assert {"architecture", "config_digest", "weights_digest", "kind"} <= fields
    await until_status(decode, refuses)
    await until_seen(gateway, lambda node: any(peer.mismatches for peer in node.status.peers))
    result = await generate(gateway, prompts[0], GREEDY)
    assert result.proof.path is RequestPath.LOCAL


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_node_finishes_what_runs_and_exits_with_0(
    start: Machines, reference: Reference, prompts: list[list[int]], role: str
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(start, prefill)
    draining, other = (prefill, decode) if role == "prefill" else (decode, prefill)
    ending = asyncio.create_task(asyncio.to_thread(start.end, draining))
    await until_status(draining, lambda last: last.draining)
    start.let_go(prefill)
    result = await request
    assert await ending == 0
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE
    await until_released(other)


async def test_a_draining_gateway_refuses_new_requests_finishes_what_runs_and_exits_with_0(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    request = asyncio.create_task(generate(gateway, prompts[0], GREEDY))
    await until_prefilling(start, prefill)
    ending = asyncio.create_task(asyncio.to_thread(start.end, gateway))
    await until_refusing(gateway, prompts[1])
    start.let_go(prefill)
    result = await request
    assert await ending == 0
    assert result.token_ids == reference.greedy(prompts[0], 12).token_ids
    assert result.proof.path is RequestPath.REMOTE


async def until_refusing(gateway: Process, prompt: list[int]) -> None:
    """Returns when the gateway refuses a new request because it drains. A request that it still accepts waits for a
    held node until its deadline, and after such ones the gateway may expect that there is no time for others."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await generate(gateway, prompt, GREEDY, timeout_s=1)
            except (Draining, NoNode):
                return
            except (DeadlineExceeded, Overloaded):
                await asyncio.sleep(0.02)


async def test_a_drained_decode_node_out_of_time_hands_its_requests_over(
    start: Machines, reference: Reference, prompts: list[list[int]]
) -> None:
    short = {**NODE, "drain_grace_s": 0.2}
    prefill, first, second = start.nodes(
        ("prefill", NODE), ("decode", short), ("decode", short), paused_engine=["decode"]
    )
    gateway = start.gateway([prefill], [first, second], model=LLAMA)
    result = Result()
    request = asyncio.create_task(generate(gateway, prompts[0], LONG, result=result))
    drained = await until_decoding(start, result, first, second)
    other = second if drained is first else first
    start.let_go(other)
    assert await asyncio.to_thread(start.end, drained) == 0
    await request
    assert result.token_ids == reference.greedy(prompts[0], LONG.resolved().max_tokens).token_ids
    await until_released(prefill, other)
