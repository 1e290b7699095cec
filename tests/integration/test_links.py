"""Pairs of real processes measure their link: both sides show it, and refuse it where it is too slow; and the receipt
has the size of segments. The floors of these tests are met by every link, or by none."""

import asyncio
import json

import pytest

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.protos.internal.v1 import prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, nothing_held, status, until_status
from tests.integration.generation import generate
from tests.integration.proxy import free_address
from tests.warm import BATON, run_warm

MODEL: Flags = {"model": LLAMA, "num_blocks": 64}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = list(range(100, 180))
# No link is that fast.
TOO_MUCH = 10_000


def refused(last: node_status_pb2.NodeStatus) -> bool:
    """Whether the node's only pair is refused for its link."""
    return any(
        peer.phase == node_status_pb2.PEER_PHASE_REFUSED and peer.mismatches[0].field == "link" for peer in last.peers
    )


def made(last: node_status_pb2.NodeStatus) -> bool:
    return any(peer.phase == node_status_pb2.PEER_PHASE_READY for peer in last.peers)


async def pair(prefill: Process, decode: Process) -> node_status_pb2.PeerState:
    """Asks the prefill node for the pair, as a gateway does."""
    async with connect(prefill.address) as channel:
        request = prefill_pb2.ConnectRequest(decode_address=decode.address)
        return await prefill_pb2_grpc.PrefillStub(channel).Connect(request, timeout=DEADLINE_S)


def shown(gateway: Process, *flags: str) -> str:
    finished = run_warm(BATON, "status", "--target", gateway.address, *flags)
    finished.check_returncode()
    return finished.stdout


async def test_both_sides_and_the_status_show_the_measurement(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", MODEL), ("decode", MODEL))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    for node in (prefill, decode):
        (peer,) = (await until_status(node, made)).peers
        assert peer.transport
        assert peer.gigabytes_per_s > 0
        assert peer.latency_s > 0
    nodes = json.loads(shown(gateway, "--json"))["nodes"]
    (peer_shown,) = [node["peers"][0] for node in nodes if node["role"] == "prefill"]
    assert peer_shown["latency_s"] > 0
    assert " us " in shown(gateway)


async def test_a_receipt_has_the_size_of_the_largest_segment(start: Machines) -> None:
    small: Flags = {**MODEL, "segment_mib": 0.03}
    prefill, decode = start.nodes(("prefill", small), ("decode", MODEL))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    receipt = (await generate(gateway, PROMPT, GREEDY)).proof
    assert receipt.segments > 1
    assert receipt.bytes_sent / receipt.segments <= receipt.segment_bytes <= 0.03 * (1 << 20)


@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_a_link_below_the_floor_of_either_node_is_refused_on_both_sides(start: Machines, who: str) -> None:
    wanted: Flags = {**MODEL, "link_floor_gb_per_s": TOO_MUCH}
    prefill, decode = start.nodes(
        ("prefill", wanted if who == "prefill" else MODEL), ("decode", wanted if who == "decode" else MODEL)
    )
    # It asks for no other measurement while the test looks at this one.
    gateway = start.gateway([prefill], [decode], model=LLAMA, link_retry_s=2 * DEADLINE_S)
    for node in (prefill, decode):
        last = await until_status(node, refused)
        (reason,) = last.peers[0].mismatches
        assert reason.field == "link"
        assert "GB/s over" in reason.ours
        assert f"at least {TOO_MUCH} GB/s" in reason.theirs
        assert f"required by {who}" in reason.theirs
        assert reason.cure
    text = shown(gateway)
    assert "refused" in text
    assert "link: " in text
    # Requests that need no pair are served, and hold nothing afterwards.
    assert (await generate(gateway, PROMPT, GREEDY)).token_ids
    await until_status(decode, nothing_held)
    # Each request for the pair measures the link again, and refuses it again.
    before = (await status(prefill)).peers[0].mismatches[0].ours
    async with asyncio.timeout(DEADLINE_S):
        while before in [mismatch.ours for mismatch in (await pair(prefill, decode)).mismatches]:
            pass


async def test_a_pair_that_was_refused_for_its_link_is_measured_again_until_it_is_made(start: Machines) -> None:
    (prefill,) = start.nodes(("prefill", MODEL))
    lasting: Flags = {**MODEL, "listen": free_address()}
    (decode,) = start.nodes(("decode", {**lasting, "link_floor_gb_per_s": TOO_MUCH}))
    gateway = start.gateway(
        [prefill], [decode], model=LLAMA, local_policy="prefer", link_retry_s=0.2, failover_wait_s=DEADLINE_S
    )
    first = (await until_status(prefill, refused)).peers[0].mismatches[0].ours
    await until_status(prefill, lambda last: refused(last) and last.peers[0].mismatches[0].ours != first)
    # The same link, with a floor that every link meets.
    start.kill(decode)
    start.nodes(("decode", lasting))
    await until_status(prefill, made)
    sent = attempt = 0
    async with asyncio.timeout(DEADLINE_S):
        while not sent:  # until the gateway knows the pair
            sent = (await generate(gateway, PROMPT, GREEDY, cache_salt=str(attempt))).proof.prompt_tokens_sent
            attempt += 1
    assert sent == len(PROMPT)


async def test_nodes_that_round_differently_are_refused(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", {**MODEL, "batch_invariant": True}), ("decode", MODEL))
    peer = await asyncio.wait_for(pair(prefill, decode), DEADLINE_S)
    assert peer.phase == node_status_pb2.PEER_PHASE_REFUSED
    (reason,) = peer.mismatches
    assert (reason.field, reason.ours, reason.theirs) == ("batch_invariant", "on", "off")
    assert "BATON_BATCH_INVARIANT" in reason.cure
