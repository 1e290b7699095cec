"""A prefill node with a decode node that keeps KV in 8 bits: refused unless the decode node accepts it, and then shown
on every side."""

import asyncio
import json
from functools import partial

import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.protos.v1 import node_status_pb2
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, status, until_status
from tests.integration.generation import generate
from tests.integration.test_links import shown

MODEL: Flags = {"model": LLAMA, "num_blocks": 64}
FP8: Flags = {**MODEL, "kv_cache_dtype": "fp8_e4m3", "kv_cache_layout": "HND", "block_size": 32}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPT = list(range(100, 180))
CONVERTED = "float32 to float8_e4m3fn"


async def test_without_the_option_the_pair_is_refused_and_the_cure_names_it(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", MODEL), ("decode", FP8))
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    for node, ours, theirs in ((prefill, "float32", "float8_e4m3fn"), (decode, "float8_e4m3fn", "float32")):
        last = await until_status(node, lambda last: last.peers[0].phase == node_status_pb2.PEER_PHASE_REFUSED)
        (reason,) = last.peers[0].mismatches
        assert (reason.field, reason.ours, reason.theirs) == ("dtype", ours, theirs)
        assert "--kv-convert-from" in reason.cure
        assert not last.peers[0].kv_converted
    assert "--kv-convert-from" in shown(gateway)
    result = await generate(gateway, PROMPT, GREEDY)
    assert (result.proof.path, result.proof.kv_converted) == (Path.LOCAL, "")


def has_counted(bytes_sent: int, converted: int, last: node_status_pb2.NodeStatus) -> bool:
    return last.segments_converted == converted and last.peers[0].bytes_total == bytes_sent


async def until_seen(gateway: Process, converted: int) -> None:
    """Returns when the gateway knows of so many converted segments."""
    async with asyncio.timeout(DEADLINE_S), OperatorClient(gateway.address) as client:
        while all(node.status.segments_converted != converted for node in (await client.cluster_status()).nodes):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_with_the_option_it_is_converted_counted_and_shown(start: Machines, ranks: int) -> None:
    prefill, decode = start.nodes(
        ("prefill", {**MODEL, "tensor_parallel_size": ranks}),
        ("decode", {**FP8, "kv_convert_from": "bfloat16,float32"}),
    )
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    result = await generate(gateway, PROMPT, GREEDY)
    receipt = result.proof
    assert len(result.token_ids) == GREEDY.max_tokens
    assert (receipt.path, receipt.kv_converted) == (Path.REMOTE, CONVERTED)
    spec = (await status(decode)).info.cache_spec
    assert spec.dtype == "float8_e4m3fn"
    assert receipt.bytes_sent == len(PROMPT) * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim
    for node, converted in ((prefill, receipt.segments), (decode, 0)):
        # The counts of a node's ranks are up to a second old.
        last = await until_status(node, partial(has_counted, receipt.bytes_sent, converted))
        assert last.peers[0].kv_converted == CONVERTED
    await until_seen(gateway, receipt.segments)
    assert CONVERTED in shown(gateway)
    shown_nodes = {node["role"]: node for node in json.loads(shown(gateway, "--json"))["nodes"]}
    assert shown_nodes["prefill"]["segments_converted"] == receipt.segments > 0
    assert shown_nodes["prefill"]["peers"][0]["kv_converted"] == CONVERTED
    # KV in the decode node's prefix cache is not sent again.
    again = await generate(gateway, PROMPT, GREEDY)
    assert again.token_ids == result.token_ids
    assert again.proof.bytes_sent < receipt.bytes_sent
