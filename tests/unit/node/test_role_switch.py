"""How long a switch of roles waits for the links of the old role, and what a status of the present one costs."""

import asyncio

import pytest

from baton.node import role_switch
from baton.node.role_services import RoleServices
from baton.node.role_switch import RoleSwitch, links_end
from kvtransfer.records import TransferCounters
from prefill_node.service import PrefillService
from tests.unit.prefill_node.nodes import prefill_node, prefill_settings


async def test_a_process_that_is_to_end_waits_for_links_no_longer_than_its_pod_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that stands still keeps its link, and pods are killed 15 s after the time for their drain."""
    monkeypatch.setattr(role_switch, "_END_S", 3600.0)
    monkeypatch.setattr(role_switch, "_STOPPING_END_S", 0.0)
    stop = asyncio.Event()
    waiting = asyncio.create_task(links_end(lambda: True, stop))
    await asyncio.sleep(0)
    stop.set()
    assert not await asyncio.wait_for(waiting, 60.0)


async def test_links_that_end_are_awaited() -> None:
    left = [True, True]
    assert await links_end(lambda: bool(left) and left.pop(), asyncio.Event())


async def test_one_status_reads_the_totals_of_the_transfer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway has each node's status read ten times a second, also while the node is idle."""
    settings = prefill_settings()
    node = prefill_node(settings)
    role = PrefillService(node, settings)
    switch = RoleSwitch(
        node, role, {}, services=RoleServices(node.name), stop=asyncio.Event(), on_failure=lambda reason: None
    )
    read, totals = [], node.transfer.counters

    def counters() -> TransferCounters:
        read.append(totals())
        return read[-1]

    monkeypatch.setattr(node.transfer, "counters", counters)
    async with node:
        assert switch.status().info == node.info
        await role.close()
    assert len(read) == 1
