"""Pairs of real processes and what they measure of their link: shown on both sides, refused where it is too slow; and
the size of segments in the receipt."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import pytest

from baton.cli.processes import Process
from baton.rpc.server import connect
from baton.types import SamplingParams
from protos.baton.v1 import common_pb2, node_pb2, prefill_pb2, prefill_pb2_grpc
from tests.integration.cluster import LLAMA, Flags, Machines, machines, nothing_held, status, until_status
from tests.integration.generation import generate

MODEL: Flags = {"model": LLAMA, "num_blocks": 64}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
PROMPT = list(range(100, 180))
# No link does that.
TOO_MUCH = 10_000


@pytest.fixture
def start() -> Iterator[Machines]:
    with machines() as started:
        yield started


async def pair(prefill: Process, decode: Process) -> common_pb2.PeerState:
    """Asks the prefill node for the pair, as a gateway does."""
    async with connect(prefill.address) as channel:
        request = prefill_pb2.ConnectRequest(decode_address=decode.address)
        return await prefill_pb2_grpc.PrefillStub(channel).Connect(request, timeout=20)


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
        assert 0 < peer.latency_s < 0.5
    (said,) = [node["peers"][0] for node in json.loads(shown(gateway, "--json"))["nodes"] if node["role"] == "prefill"]
    assert 0 < said["latency_s"] < 0.5
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
        last = await until_status(node, lambda last: last.peers[0].phase == common_pb2.PEER_PHASE_REFUSED)
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
    # Asked again it is measured again, and refused again.
    before = (await status(prefill)).peers[0].mismatches[0].ours
    measured = {(await pair(prefill, decode)).mismatches[0].ours for _ in range(3)}
    assert measured - {before}


@contextmanager
def held_up(process: Process) -> Iterator[None]:
    """The process runs for a sixteenth of the time, in slices that are short beside what is measured."""
    ended = threading.Event()

    def hold_up() -> None:
        while not ended.wait(0.002):
            process.popen.send_signal(signal.SIGSTOP)
            ended.wait(0.03)
            process.popen.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def phase(last: node_pb2.NodeStatus) -> int:
    """Of its only peer."""
    return last.peers[0].phase if last.peers else common_pb2.PEER_PHASE_CONNECTING


async def measured(prefill: Process, decode: Process) -> float:
    """GB/s of a link that is below the floor, each time anew."""
    (reason,) = (await pair(prefill, decode)).mismatches
    return float(reason.ours.partition(" ")[0])


async def test_a_pair_that_was_refused_for_its_link_is_made_once_the_link_is_quick_enough(start: Machines) -> None:
    prefill, never = start.nodes(("prefill", MODEL), ("decode", {**MODEL, "link_floor_gb_per_s": TOO_MUCH}))
    usual = median([await measured(prefill, never) for _ in range(3)])
    (decode,) = start.nodes(("decode", {**MODEL, "link_floor_gb_per_s": usual / 2}))
    with held_up(prefill):
        gateway = start.gateway([prefill], [decode], model=LLAMA, local_policy="prefer", link_retry_s=0.5)
        refused = await until_status(decode, lambda last: phase(last) == common_pb2.PEER_PHASE_REFUSED, within_s=20)
    assert refused.peers[0].mismatches[0].field == "link"
    await until_status(decode, lambda last: phase(last) == common_pb2.PEER_PHASE_READY, within_s=20)
    for attempt in range(50):  # the gateway hears of it a moment later
        receipt = (await generate(gateway, PROMPT, GREEDY, cache_salt=str(attempt))).proof
        if receipt.prompt_tokens_sent:
            break
        await asyncio.sleep(0.1)
    assert receipt.prompt_tokens_sent == len(PROMPT)


async def test_nodes_that_round_differently_are_refused(start: Machines) -> None:
    prefill, decode = start.nodes(("prefill", {**MODEL, "batch_invariant": True}), ("decode", MODEL))
    peer = await asyncio.wait_for(pair(prefill, decode), 30)
    assert peer.phase == common_pb2.PEER_PHASE_REFUSED
    (reason,) = peer.mismatches
    assert (reason.field, reason.ours, reason.theirs) == ("batch_invariant", "on", "off")
    assert "BATON_BATCH_INVARIANT" in reason.cure
