"""This version and the pinned one in one cluster: every mixture hands requests over with exact tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest

from baton.cli.processes import Process, Processes
from baton.cli.status_json import to_json
from baton.client.client import Client
from baton.core.types import Path, SamplingParams
from baton.node import assembly
from baton.protos.v1 import common_pb2
from baton.rpc.revisions import revision_of
from kvtransfer.plan import WIRE_NEWEST
from tests.integration.cluster import LLAMA, Flags, Machines, arguments, machines, nothing_held, status, until_status
from tests.integration.generation import generate
from tests.integration.proxy import free_address
from tests.integration.reference import Reference
from tests.integration.test_rolling_restart import CLIENTS, Load, until_whole
from tests.interop.release import VERSION, WIRE, launch_release

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NODE: Flags = {"model": LLAMA, "num_blocks": 256, "device": "cpu", "prefix_cache": False, "drain_grace_s": 600}
STRICT: dict[str, Any] = {"model": LLAMA, "local_policy": "strict", "failover_wait_s": 600}


class Pair(NamedTuple):
    prefill: Process
    decode: Process


class Mixed(NamedTuple):
    start: Machines
    release: Processes
    old: Pair
    new: Pair


@contextmanager
def release() -> Iterator[Processes]:
    with Processes(report=lambda line: None, launch=launch_release) as processes:
        yield processes


@pytest.fixture(scope="module")
def mixed() -> Iterator[Mixed]:
    with release() as processes, machines() as start:
        old = [
            processes.start(f"{role}_node", arguments({"name": f"old-{role}", **NODE}))
            for role in ("prefill", "decode")
        ]
        new = start.nodes(("prefill", NODE), ("decode", NODE))
        processes.wait_ready(old)
        yield Mixed(start, processes, Pair(*old), Pair(*new))


def old_gateway(mixed: Mixed, prefill: Sequence[Process], decode: Sequence[Process], **flags: object) -> Process:
    joined = {
        "prefill": ",".join(node.address for node in prefill),
        "decode": ",".join(node.address for node in decode),
    }
    gateway = mixed.release.start("gateway", arguments({**joined, **STRICT, **flags}))
    mixed.release.wait_ready([gateway])
    return gateway


async def hands_over(gateway: Process, reference: Reference, prefill: Process, decode: Process) -> None:
    (prompt,) = reference.prompts([150])
    result = await generate(gateway, prompt, GREEDY)
    assert result.token_ids == reference.greedy(prompt, GREEDY.max_tokens).token_ids
    assert (result.proof.path, result.proof.attempts) == (Path.REMOTE, 1)
    assert result.proof.prompt_tokens_sent == len(prompt)
    for node in (prefill, decode):
        await until_status(node, nothing_held)


async def test_the_pinned_version_is_another_one(mixed: Mixed) -> None:
    old, new = await status(mixed.old.decode), await status(mixed.new.decode)
    assert old.info.package_version == VERSION != new.info.package_version
    assert (old.info.wire.oldest, old.info.wire.newest) == (WIRE, WIRE)
    assert new.info.wire.oldest == WIRE < new.info.wire.newest


async def test_this_gateway_pairs_old_and_new_nodes(mixed: Mixed, reference: Reference) -> None:
    for prefill, decode in ((mixed.old.prefill, mixed.new.decode), (mixed.new.prefill, mixed.old.decode)):
        await hands_over(mixed.start.gateway([prefill], [decode], **STRICT), reference, prefill, decode)


async def test_the_old_gateway_works_with_new_nodes(mixed: Mixed, reference: Reference) -> None:
    await hands_over(old_gateway(mixed, [mixed.new.prefill], [mixed.new.decode]), reference, *mixed.new)


async def test_this_gateway_works_with_old_nodes(mixed: Mixed, reference: Reference) -> None:
    gateway = mixed.start.gateway([mixed.old.prefill], [mixed.old.decode], **STRICT)
    await hands_over(gateway, reference, *mixed.old)
    async with Client(gateway.address) as client:
        shown = str(to_json(await client.cluster_status())["mixed"])
    assert shown.startswith("mixed versions: ")
    assert f"{VERSION} on old-prefill and old-decode" in shown
    assert "revisions" not in shown


async def test_old_and_new_nodes_have_one_revision(mixed: Mixed) -> None:
    nodes = [await status(node) for node in (*mixed.old, *mixed.new)]
    assert len({revision_of(node.info.model) for node in nodes}) == 1


@pytest.mark.slow
async def test_the_old_gateway_pairs_old_and_new_nodes(mixed: Mixed, reference: Reference) -> None:
    for prefill, decode in ((mixed.old.prefill, mixed.new.decode), (mixed.new.prefill, mixed.old.decode)):
        await hands_over(old_gateway(mixed, [prefill], [decode]), reference, prefill, decode)


def become_a_later_version() -> None:
    """Of a node that no longer speaks this version's wire."""
    vars(assembly).update(wire_oldest=lambda *_, **__: WIRE_NEWEST + 1, WIRE_NEWEST=WIRE_NEWEST + 2)


async def test_versions_without_a_common_wire_are_refused_with_the_reason(mixed: Mixed, reference: Reference) -> None:
    (later,) = mixed.start.nodes(("decode", NODE), prepare=become_a_later_version)
    gateway = mixed.start.gateway([mixed.old.prefill], [later], model=LLAMA, local_policy="prefer")
    (peer,) = [peer for peer in (await status(mixed.old.prefill)).peers if peer.address == later.address]
    assert peer.phase == common_pb2.PEER_PHASE_REFUSED
    (mismatch,) = peer.mismatches
    assert (mismatch.field, mismatch.ours, mismatch.cure) == (
        "wire", f"{WIRE} to {WIRE}", f"upgrade this node from package version {VERSION}",
    )  # fmt: skip
    (prompt,) = reference.prompts([60])
    result = await generate(gateway, prompt, GREEDY)
    assert result.token_ids == reference.greedy(prompt, GREEDY.max_tokens).token_ids
    assert result.proof.path is Path.LOCAL


@pytest.mark.slow
async def test_an_upgrade_of_every_role_under_load_loses_nothing(mixed: Mixed, reference: Reference) -> None:
    """Last: it ends the old nodes."""
    prompts = reference.prompts([40 + 17 * number for number in range(8)])
    answers = [reference.greedy(prompt, GREEDY.max_tokens).token_ids for prompt in prompts]
    old, new = mixed.old, mixed.new
    both = [old.prefill, new.prefill], [old.decode, new.decode]
    gateways = [old_gateway(mixed, *both, local_policy="prefer", listen=free_address()) for _ in range(2)]
    load = Load([gateway.address for gateway in gateways], prompts, answers, GREEDY)
    async with asyncio.TaskGroup() as group:
        loading = group.create_task(load.run())
        await load.until_served(CLIENTS)
        for gateway in gateways:
            assert await asyncio.to_thread(mixed.start.end, gateway) == 0
            await load.until_served(CLIENTS)
            again = partial(mixed.start.gateway, *both, model=LLAMA, listen=gateway.address)
            upgraded = await asyncio.to_thread(again)
            await until_whole(upgraded.address, pairs=4)
            await load.until_served(CLIENTS)
        for node in old:
            assert await asyncio.to_thread(mixed.start.end, node) == 0
            await load.until_served(CLIENTS)
        load.end()
        await loading
    for node in new:
        await until_status(node, nothing_held)
