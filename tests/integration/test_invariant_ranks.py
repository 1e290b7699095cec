"""A pair of batch-invariant nodes of two ranks each: tokens and logprobs of a request are the same to the last bit
alone and in a crowd. A node of one rank is refused, because its sums have other parts."""

import asyncio

from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import LLAMA, Flags, Machines, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference

LENGTHS = [40, 129, 200, 7, 64]
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5, ignore_eos=True, logprobs=0)
NODE: Flags = {
    "model": LLAMA,
    "tensor_parallel_size": 2,
    "batch_invariant": True,
    "num_blocks": 256,
    "max_batch_tokens": 64,
    "prefix_cache": False,
}


async def test_a_request_has_the_same_logprobs_alone_and_in_a_crowd(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")

    async def outputs(*prompts: list[int]) -> list[tuple[list[int], list[float]]]:
        results = await asyncio.gather(*(generate(gateway, prompt, DRAWN) for prompt in prompts))
        assert all(result.proof.path is RequestPath.REMOTE for result in results)
        return [(result.token_ids, result.logprobs) for result in results]

    prompts = reference.prompts(LENGTHS)
    together = await outputs(*prompts)
    for prompt, expected in zip(prompts[:3], together, strict=False):
        assert len(expected[1]) == DRAWN.max_tokens
        assert await outputs(prompt) == [expected]


def refuses_its_ranks(status: node_status_pb2.NodeStatus) -> bool:
    return any(
        peer.phase == node_status_pb2.PEER_PHASE_REFUSED
        and [mismatch.field for mismatch in peer.mismatches] == ["tensor_parallel_size"]
        for peer in status.peers
    )


async def test_a_node_of_another_number_of_ranks_is_refused(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", {**NODE, "tensor_parallel_size": 1}))
    start.gateway([prefill], [decode], model=LLAMA, wait=False)
    await until_status(prefill, refuses_its_ranks)
