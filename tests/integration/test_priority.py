"""Among requests that wait for a node, better priorities are served first."""

import asyncio
from functools import partial

from baton.cli.processes import Process
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, until_status
from tests.integration.reference import Reference

PROMPT_TOKENS = 300
STEP_TOKENS = 64
PROMPT_STEPS = -(-PROMPT_TOKENS // STEP_TOKENS)
NODE: Flags = {"model": LLAMA, "prefix_cache": False, "max_batch_tokens": STEP_TOKENS}
ROOM_FOR_ONE: Flags = {**NODE, "num_blocks": 25}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PRIORITIES = (0, 1, 0, -1)
ORDER = [0, 3, 2, 1]  # the first one runs already


async def finish_order(start: Machines, prefill: Process, decode: Process, full: Process, reference: Reference) -> None:
    """The requests arrive in the order of PRIORITIES and wait for `full`, which has room for one."""
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    prompts = reference.prompts([PROMPT_TOKENS] * len(PRIORITIES))
    finished: list[int] = []

    async def serve(client: AsyncClient, index: int) -> None:
        completion = await client.complete(prompts[index], GREEDY, priority=PRIORITIES[index])
        assert [token.token_id for token in completion.tokens] == reference.greedy(prompts[index], 4).token_ids
        finished.append(index)

    def waits(last: node_status_pb2.NodeStatus, *, count: int) -> bool:
        taken = last.blocks_leased > 0 or last.requests_running > 0
        return last.requests_waiting == count and (taken or count == 0)

    async with AsyncClient(gateway.address) as client:
        requests = []
        for index in range(len(PRIORITIES)):
            requests.append(asyncio.create_task(serve(client, index)))
            if index == 0:
                await until_status(full, lambda last: last.blocks_free < last.blocks_total)
            else:
                await until_status(full, partial(waits, count=index))
        waiting = set(requests)
        for count in range(1, len(ORDER) + 1):
            start.allow_steps(PROMPT_STEPS, prefill)  # one prompt at a time
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert finished == ORDER[:count]
        await asyncio.gather(*requests)
    for node in (prefill, decode):
        await until_status(node, nothing_held)


async def test_a_full_decode_node_serves_the_best_priority_first(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", ROOM_FOR_ONE), paused_engine=["prefill"])
    await finish_order(start, prefill, decode, decode, reference)


async def test_a_full_prefill_node_serves_the_best_priority_first(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", ROOM_FOR_ONE), ("decode", NODE), paused_engine=["prefill"])
    start.allow_steps(1, prefill)  # the first request runs, and keeps its blocks
    await finish_order(start, prefill, decode, prefill, reference)
