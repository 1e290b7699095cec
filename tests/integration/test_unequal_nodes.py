"""One prefill node serves several decode nodes, with larger and smaller caches than its own."""

import asyncio

import pytest

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.protos.internal.v1 import prefill_pb2, prefill_pb2_grpc
from baton.rpc.channels import connect
from tests.integration.cluster import LLAMA, Machines, nothing_held, status, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NODE = {"model": LLAMA, "num_blocks": 256, "prefix_cache": False}
# Of two prompts of 600 tokens, 160 are computed while the prefill node is held.
STEP_TOKENS, STEPS = 16, 10
HELD = {**NODE, "max_batch_tokens": STEP_TOKENS}
SMALL = {**NODE, "num_blocks": 38}
SMALL_CONTEXT = 38 * 16


async def test_a_request_that_ends_at_one_decode_node_does_not_affect_requests_at_another(
    start: Machines, reference: Reference
) -> None:
    prefill, first, second = start.nodes(
        ("prefill", HELD), ("decode", HELD), ("decode", HELD), paused_engine=["prefill"]
    )
    gateways = [start.gateway([prefill], [each], model=LLAMA, local_policy="strict") for each in (first, second)]
    prompts = reference.prompts([600, 600])
    # The first lease of each decode node: both have the same number.
    cancelled, kept = (
        asyncio.create_task(generate(gateway, prompt, GREEDY))
        for gateway, prompt in zip(gateways, prompts, strict=True)
    )
    for each in (first, second):
        await until_status(each, lambda last: last.blocks_leased > 0)
    await until_status(prefill, lambda last: last.requests_total == 2)
    start.allow_steps(STEPS, prefill)
    await until_status(prefill, lambda last: last.tokens_waiting == 1200 - STEPS * STEP_TOKENS)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await until_status(first, nothing_held)
    assert (await status(second)).blocks_leased > 0
    start.let_go(prefill)
    result = await kept
    assert result.token_ids == reference.greedy(prompts[1], GREEDY.resolved().max_tokens).token_ids
    assert result.proof.attempts == 1
    for each in (prefill, first, second):
        await until_status(each, nothing_held)


@pytest.mark.parametrize("short_of_it", [1, 2])
@pytest.mark.parametrize("smaller", ["prefill", "decode"])
async def test_the_output_ends_where_the_decode_nodes_context_is_full(
    start: Machines, reference: Reference, smaller: str, short_of_it: int
) -> None:
    prefill, decode = start.nodes(*((role, SMALL if role == smaller else NODE) for role in ("prefill", "decode")))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    (prompt,) = reference.prompts([SMALL_CONTEXT - short_of_it])
    result = await generate(gateway, prompt, GREEDY)
    assert result.proof.path is RequestPath.REMOTE
    assert result.finish_reason == "FINISH_REASON_LENGTH"
    expected = reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    assert result.token_ids == (expected if smaller == "prefill" else expected[:short_of_it])
    for each in (prefill, decode):
        await until_status(each, nothing_held)


async def test_a_prefill_node_forgets_decode_nodes_that_were_lost_long_ago(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    async with connect(prefill.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        await stub.Connect(prefill_pb2.ConnectRequest(decode_address=decode.address))
        nobodys = [f"127.1.0.{number}:1" for number in range(1, 41)]  # a machine may have a listener at port 22
        for address in nobodys:
            await stub.Connect(prefill_pb2.ConnectRequest(decode_address=address))
    peers = [peer.address for peer in (await status(prefill)).peers]
    assert decode.address in peers
    assert nobodys[-1] in peers
    assert len(peers) < len(nobodys)
