"""A gateway sends whole requests to a prefill node that also decodes, and moves them when it dies."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from baton.client.operators import OperatorClient
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.gateway.fleet import fleet
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.router import RoutedRequest, usable_decodes
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, status, until_status
from tests.integration.generation import Result, generate
from tests.integration.reference import Reference

NODE: Flags = {"model": LLAMA, "max_batch_tokens": 64, "num_blocks": 256}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def _whole_first(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement | None:
    """In place of the choice by costs: a prefill node serves the whole request, if one can."""
    alone = usable_decodes([node for node in decodes if node.also_prefills], wanted)
    return (
        Placement(Route.LOCAL, alone[0], None, 0, "the test says so", None)
        if alone
        else place(decodes, prefills, wanted)
    )


def choose_whole() -> None:
    vars(fleet)["place"] = _whole_first


async def test_a_request_is_served_by_a_prefill_node_and_continues_on_the_decode_node_when_that_is_killed(
    start: Machines, reference: Reference
) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["prefill"])
    gateway = start.gateway([prefill], [decode], model=LLAMA, prepare=choose_whole, local_policy="elastic")
    whole, moved = reference.prompts([150, 100])
    names = [(await status(node)).info.name for node in (prefill, decode)]
    async with OperatorClient(gateway.address) as client:
        start.allow_steps(
            3 + 11, prefill
        )  # the prompt's steps, the last of which draws a token, and one for each other
        served = await client.complete(whole, GREEDY)
        assert [token.token_id for token in served.tokens] == reference.greedy(whole, 12).token_ids
        assert (served.receipt.path, served.receipt.decode_node) == (Path.LOCAL, names[0])
        assert served.receipt.why == f"prompt prefilled on {names[0]}: the test says so"
        nodes = (await client.cluster_status()).nodes
        assert [(node.status.info.name, node.status.info.role) for node in nodes] == [
            (names[0], node_status_pb2.ROLE_PREFILL),
            (names[1], node_status_pb2.ROLE_DECODE),
        ]
    result = Result()
    request = asyncio.create_task(generate(gateway, moved, replace(GREEDY, max_tokens=40), result=result))
    start.allow_steps(2 + 5, prefill)
    await result.until_tokens(5)
    start.kill(prefill)
    await request
    assert result.token_ids == reference.greedy(moved, 40).token_ids
    assert (result.proof.path, result.proof.decode_node, result.proof.attempts) == (Path.LOCAL, names[1], 2)
    assert f"{names[0]} was lost" in result.proof.why
    await until_status(decode, nothing_held)


async def test_a_cluster_that_loses_its_decode_node_serves_on(start: Machines, reference: Reference) -> None:
    prefill, decode = start.nodes(("prefill", NODE), ("decode", NODE), paused_engine=["decode"])
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    prompt, other = reference.prompts([100, 90])
    result = Result()
    request = asyncio.create_task(generate(gateway, prompt, GREEDY, result=result))
    start.allow_steps(4, decode)
    await result.until_tokens(3)
    start.kill(decode)
    await request
    assert result.token_ids == reference.greedy(prompt, 12).token_ids
    assert (result.proof.path, result.proof.attempts) == (Path.LOCAL, 2)
    assert result.proof.why.endswith("no decode node is available")
    alone = await generate(gateway, other, GREEDY)
    assert alone.token_ids == reference.greedy(other, 12).token_ids
    assert alone.proof.decode_node == (await status(prefill)).info.name
    await until_status(prefill, nothing_held)
