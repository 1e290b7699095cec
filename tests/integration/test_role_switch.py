"""Nodes change their role while clients ask without a pause: nothing is lost, and no weights are loaded again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.cli.processes import Process
from baton.client.operators import OperatorClient
from baton.core.errors import BatonError, InvalidRequest
from baton.protos.v1 import node_status_pb2
from baton.security.certificates import write_set
from tests.integration.cluster import DEADLINE_S, LLAMA, Flags, Machines, first_of, nothing_held, until_status
from tests.integration.reference import Reference
from tests.integration.test_rolling_restart import CLIENTS, GREEDY, Load, until_whole
from tests.warm import BATON, run_warm

NODE: Flags = {"model": LLAMA, "num_blocks": 256}
PREFILL, DECODE = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE


def shown(folder: Path, name: str) -> dict[str, Any]:
    return {"tls_cert": folder / f"{name}.crt", "tls_key": folder / f"{name}.key", "tls_ca": folder / "ca.crt"}


async def test_a_node_switches_to_the_other_role_and_back_under_load_for_all_gateways(
    start: Machines, reference: Reference, tmp_path: Path
) -> None:
    """With mutual TLS: the node's certificate is for both roles, the decode node's is not."""
    prompts = reference.prompts([40, 57, 74])
    answers = [reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids for prompt in prompts]
    write_set(tmp_path, hosts=["127.0.0.1"], days=1)
    nodes = start.nodes(
        *((role, NODE | shown(tmp_path, name)) for role, name in (("prefill", "prefill"), ("prefill", "node"))),
        ("decode", NODE | shown(tmp_path, "decode")),
    )

    def open_gateway() -> Process:
        return start.gateway(nodes[:2], nodes[2:], model=LLAMA, **shown(tmp_path, "gateway"))

    first = open_gateway()
    load = Load([first.address], prompts, answers)
    async with OperatorClient(first.address) as client, asyncio.TaskGroup() as group:
        switching, single = nodes[1].address, nodes[2].address
        loads = [group.create_task(load.run())]
        await load.until_served(CLIENTS)
        with pytest.raises(InvalidRequest, match="is the last usable decode node"):
            await client.switch_role(single, PREFILL)
        done, same = await asyncio.gather(*(client.switch_role(switching, DECODE, grace_s=60.0) for _ in range(2)))
        assert (done.info.role, same.info.incarnation) == (DECODE, done.info.incarnation)
        with pytest.raises(InvalidRequest, match="the certificate of a decode, not of a prefill"):
            await client.switch_role(single, PREFILL)
        second = await asyncio.to_thread(open_gateway)
        late = Load([second.address], prompts, answers)
        loads.append(group.create_task(late.run()))
        for gateway in (first, second):
            await until_whole(gateway.address, pairs=2)
        for each in (load, late):
            await each.until_served(CLIENTS)
        words = ("role", done.info.name, "prefill", "--grace-s", "0", "--target", second.address)
        printed = await asyncio.to_thread(run_warm, BATON, *words)
        assert (printed.returncode, printed.stderr) == (0, "")
        assert printed.stdout.startswith(f"{done.info.name} is a prefill node now, after ")
        await until_roles(client, PREFILL, PREFILL, DECODE)  # the other gateway may know it later
        assert (await client.switch_role(switching, PREFILL)).elapsed_s == 0, "it is one already"
        for gateway in (first, second):
            await until_whole(gateway.address, pairs=2)
        for each in (load, late):
            await each.until_served(CLIENTS)
            each.end()
        await asyncio.gather(*loads)
        reports = [report.status for report in (await client.cluster_status()).nodes]
        assert sorted(report.role_switches for report in reports) == [0, 0, 2]


async def test_a_request_in_transfer_goes_on_elsewhere_when_its_decode_node_switches_or_is_killed_meanwhile(
    start: Machines, reference: Reference
) -> None:
    roles = ("prefill", "decode", "decode", "decode")
    prefill, *decodes = start.nodes(*((role, NODE) for role in roles), paused_engine=["prefill"])
    gateway = start.gateway([prefill], decodes, model=LLAMA)
    (prompt,) = reference.prompts([70])

    async def chosen() -> Process:
        return await first_of(lambda node: until_status(node, lambda last: last.blocks_leased > 0), decodes)

    async with OperatorClient(gateway.address) as client:
        asking = asyncio.create_task(client.complete(prompt, GREEDY))
        first = await chosen()
        switching = asyncio.create_task(client.switch_role(first.address, PREFILL, grace_s=1e6))
        await until_status(first, lambda last: last.next_role == PREFILL)
        await asyncio.to_thread(start.kill, first)
        decodes.remove(first)
        with pytest.raises(BatonError):
            await switching
        second = await chosen()
        assert (await client.switch_role(second.address, PREFILL, grace_s=0.0)).info.role == PREFILL
        start.let_all_go()
        completion = await asking
    expected = reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    assert [token.token_id for token in completion.tokens] == expected
    for node in (prefill, *decodes):
        await until_status(node, nothing_held)


async def until_roles(client: OperatorClient, *wanted: node_status_pb2.Role.ValueType) -> None:
    """Returns when the gateway reaches nodes of these roles."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            reports = (await client.cluster_status()).nodes
            if sorted(report.status.info.role for report in reports if report.reachable) == sorted(wanted):
                return
            await asyncio.sleep(0.05)


async def test_a_gateway_moves_an_idle_decode_node_to_where_prompts_wait(start: Machines, reference: Reference) -> None:
    prefill, *decodes = start.nodes(
        *((role, NODE) for role in ("prefill", "decode", "decode")), paused_engine=["prefill"]
    )
    rules: dict[str, Any] = {"balance_backlog_s": 0.001, "balance_hold_s": 0.05, "balance_cool_down_s": 0.0}
    gateway = start.gateway([prefill], decodes, model=LLAMA, balance_roles=True, **rules)
    prompts = reference.prompts([60, 70])
    answers = [reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids for prompt in prompts]
    async with OperatorClient(gateway.address) as client:
        start.let_go(prefill)  # it learns what steps cost, and then reports seconds
        first = await client.complete(prompts[0], GREEDY)
        start.allow_steps(0, prefill)
        asking = asyncio.create_task(client.complete(prompts[1], GREEDY))
        await until_roles(client, PREFILL, PREFILL, DECODE)
        start.let_all_go()
        completions = [first, await asking]
    assert [[token.token_id for token in each.tokens] for each in completions] == answers
