"""Injects the faults of a schedule into a cluster, several at once, and ends them all at the end of the storm."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from random import Random

from tests.chaos.cluster import Cluster
from tests.chaos.history import DiedAt, FaultBegan, FaultEnded
from tests.chaos.scenario import Fault
from tests.chaos.steps import damage_host_memory, damage_segments, die_at, fill_disk, rot, step_of

# A node that never comes to the step at which it should die is killed after so long.
_DIE_S = 8.0


class Storm:
    """The faults of one run.

    Args:
        over: set when the storm is over: a fault that would last longer ends then.
    """

    def __init__(self, cluster: Cluster, over: asyncio.Event) -> None:
        self._cluster = cluster
        self._history = cluster.history
        self._over = over
        self._hit: set[str] = set()

    async def rage(self, faults: tuple[Fault, ...]) -> None:
        """Returns when the storm is over and every fault has ended."""
        begun_s = self._history.now_s()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await self._pause(begun_s + fault.at_s - self._history.now_s())
                if self._over.is_set():
                    return
                tasks.create_task(self._happen(fault), name=f"fault-{fault.number}")

    async def _happen(self, fault: Fault) -> None:
        # One fault at a time for each process and each link; others go on at the same time.
        if fault.target in self._hit:
            return
        self._hit.add(fault.target)
        add, now_s = self._history.add, self._history.now_s
        add(FaultBegan(now_s(), fault.number, fault.kind, fault.target, fault.detail))
        method: Callable[[Fault], Awaitable[None]] = getattr(self, fault.kind)
        member = self._cluster.members.get(fault.target)
        if member is not None:
            member.expected = True
        try:
            await method(fault)
        finally:
            if member is not None:
                member.expected = False
            self._hit.discard(fault.target)
        add(FaultEnded(now_s(), fault.number))

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), max(0.0, seconds))

    # ---- faults of processes

    async def kill(self, fault: Fault) -> None:
        await self._cluster.kill(fault.target)
        await self._pause(fault.seconds)
        await self._start(fault.target)

    async def freeze(self, fault: Fault) -> None:
        self._cluster.signal(fault.target, signal.SIGSTOP)
        await self._pause(fault.seconds)
        self._cluster.signal(fault.target, signal.SIGCONT)

    async def drain(self, fault: Fault) -> None:
        self._cluster.signal(fault.target, signal.SIGTERM)
        if await self._cluster.until_ended(fault.target) != 0:
            self._cluster.crashed(fault.target)
        await self._pause(fault.seconds)
        await self._start(fault.target)

    async def die_prefill(self, fault: Fault) -> None:
        await self._die(fault, "prefill")

    async def die_decode(self, fault: Fault) -> None:
        await self._die(fault, "decode")

    async def _die(self, fault: Fault, role: str) -> None:
        await self._cluster.kill(fault.target)
        self._cluster.start(fault.target, prepare=partial(die_at, step_of(role, fault.detail)))
        dying = asyncio.create_task(self._cluster.until_ended(fault.target))
        await asyncio.wait([dying], timeout=_DIE_S)
        if dying.done():
            self._history.add(DiedAt(self._history.now_s(), fault.target, f"{role}: {fault.detail}"))
        else:
            self._cluster.signal(fault.target, signal.SIGKILL)
        await dying
        await self._pause(fault.seconds)
        await self._start(fault.target)

    async def damage(self, fault: Fault) -> None:
        await self._live_as(fault, damage_segments)

    async def bad_memory(self, fault: Fault) -> None:
        await self._live_as(fault, damage_host_memory)

    async def full_disk(self, fault: Fault) -> None:
        await self._live_as(fault, fill_disk)

    async def rot(self, fault: Fault) -> None:
        await asyncio.to_thread(rot, self._cluster.kept, Random(fault.number))

    async def _live_as(self, fault: Fault, prepare: Callable[[], None]) -> None:
        """Lets a process live for a while with this change."""
        await self._cluster.kill(fault.target)
        self._cluster.start(fault.target, prepare=prepare)
        await self._cluster.until_ready(fault.target)
        await self._pause(fault.seconds)
        if self._cluster.members[fault.target].ended:
            self._cluster.crashed(fault.target)
        else:
            await self._cluster.kill(fault.target)
        await self._start(fault.target)

    async def _start(self, name: str) -> None:
        self._cluster.start(name)
        await self._cluster.until_ready(name)

    # ---- faults of links

    async def cut(self, fault: Fault) -> None:
        self._cluster.links[fault.target].cut()
        await self._heal_later(fault)

    async def reset(self, fault: Fault) -> None:
        self._cluster.links[fault.target].reset()

    async def half_open(self, fault: Fault) -> None:
        self._cluster.links[fault.target].silence(fault.detail)
        await self._heal_later(fault)

    async def delay(self, fault: Fault) -> None:
        self._cluster.links[fault.target].delay_s = float(fault.detail)
        await self._heal_later(fault)

    async def slow(self, fault: Fault) -> None:
        self._cluster.links[fault.target].bytes_per_s = float(fault.detail)
        await self._heal_later(fault)

    async def _heal_later(self, fault: Fault) -> None:
        await self._pause(fault.seconds)
        self._cluster.links[fault.target].heal()
