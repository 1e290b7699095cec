"""How long a switch of roles waits for the links of the old role."""

import asyncio

import pytest

from baton.node import role_switch
from baton.node.role_switch import links_end


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
