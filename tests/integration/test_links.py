"""Pairs of real processes and what they measure of their link: shown on both sides, refused where it is too slow; and
the size of segments in the receipt. Floors are such that every link meets them or none does."""

import asyncio
import json
import subprocess
import sys
import time

import pytest

from baton.cli.processes import Process
from baton.rpc.server import connect
from baton.types import SamplingParams
from protos.baton.v1 import common_pb2, node_pb2, prefill_pb2, prefill_pb2_grpc
from tests.integration.cluster import LLAMA, Flags, Machines, nothing_held, status, until_status
from tests.integration.generation import generate

MODEL: Flags = {"model": LLAMA, "num_blocks": 64}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = list(range(100, 180))
# No link is as fast as that.
TOO_MUCH = 10_000
# Only what hangs takes that long, however busy the machine is.
DEADLINE_S = 60.0


def refused(last: node_pb2.NodeStatus) -> bool:
    """Its only pair is refused for its link."""
    return any(
        peer.phase == common_pb2.PEER_PHASE_REFUSED and peer.mismatches[0].field == "link" for peer in last.peers
    )


def made(last: node_pb2.NodeStatus) -> bool:
    return any(peer.phase == common_pb2.PEER_PHASE_READY for peer in last.peers)


async def pair(prefill: Process, decode: Process) -> common_pb2.PeerState:
    """Asks the prefill node for the pair, as a gateway does."""
    async with connect(prefill.address) as channel:
        request = prefill_pb2.ConnectRequest(decode_address=decode.address)
        return await prefill_pb2_grpc.PrefillStub(channel).Connect(request, timeout=DEADLINE_S)


def shown(gateway: Process, *flags: str) -> str:
    command = [
        sys.executable,
        "-c",
        "from baton.cli import main; main()",
        "status",
        "--target",
        gateway.address,
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def test_both_sides_and_the_status_show_what_was_measured(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", MODEL), ("decode", MODEL))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="strict")
    for node in (prefill, decode):
        (peer,) = (await status(node)).peers
        assert peer.phase == common_pb2.PEER_PHASE_READY
        assert peer.transport
        assert peer.gigabytes_per_s > 0
        assert peer.latency_s > 0
    (said,) = [node["peers"][0] for node in json.loads(shown(gateway, "--json"))["nodes"] if node["role"] == "prefill"]
    assert said["latency_s"] > 0
    assert "latency us" in shown(gateway)


async def test_a_receipt_tells_the_largest_segment(start: Machines) -> None:
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
    gateway = start.gateway([prefill], [decode], model=LLAMA)
    for node in (prefill, decode):
        last = await until_status(node, refused, within_s=DEADLINE_S)
        (reason,) = last.peers[0].mismatches
        assert reason.field == "link"
        assert "GB/s over" in reason.ours
        assert f"at least {TOO_MUCH} GB/s" in reason.theirs
        assert f"wanted by {who}" in reason.theirs
        assert reason.cure
    said = shown(gateway)
    assert "refused" in said
    assert "link: " in said
    # What needs no pair is served; nothing is held for the one that is not there.
    assert (await generate(gateway, PROMPT, GREEDY)).token_ids
    await until_status(decode, nothing_held)
    # Each request for the pair measures the link again, and refuses it again.
    before = (await status(prefill)).peers[0].mismatches[0].ours
    measured = {(await pair(prefill, decode)).mismatches[0].ours for _ in range(3)}
    assert measured - {before}


async def test_a_pair_that_was_refused_for_its_link_is_measured_again_until_it_is_made(start: Machines) -> None:
    (prefill,) = start.nodes(("prefill", MODEL))
    (decode,) = start.nodes(("decode", {**MODEL, "link_floor_gb_per_s": TOO_MUCH}))
    gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="prefer", link_retry_s=0.2)
    first = (await until_status(prefill, refused, within_s=DEADLINE_S)).peers[0].mismatches[0].ours
    await until_status(
        prefill, lambda last: refused(last) and last.peers[0].mismatches[0].ours != first, within_s=DEADLINE_S
    )
    # The same link, with a floor that every link meets.
    start.kill(decode)
    start.nodes(("decode", {**MODEL, "listen": decode.address}))
    await until_status(prefill, made, within_s=DEADLINE_S)
    end_s = time.monotonic() + DEADLINE_S
    sent = attempt = 0
    while not sent:  # until the gateway knows of the pair
        assert time.monotonic() < end_s
        sent = (await generate(gateway, PROMPT, GREEDY, cache_salt=str(attempt))).proof.prompt_tokens_sent
        attempt += 1
    assert sent == len(PROMPT)


async def test_nodes_that_round_differently_are_refused(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", {**MODEL, "batch_invariant": True}), ("decode", MODEL))
    peer = await asyncio.wait_for(pair(prefill, decode), DEADLINE_S)
    assert peer.phase == common_pb2.PEER_PHASE_REFUSED
    (reason,) = peer.mismatches
    assert (reason.field, reason.ours, reason.theirs) == ("batch_invariant", "on", "off")
    assert "BATON_BATCH_INVARIANT" in reason.cure
