"""Schedules the questions of a bounded process: each lane takes one at a time. Each client has one in line, so a client
with many questions delays others by one."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Turns:
    """Gives clients turns on each lane. Used on one event loop."""

    def __init__(self, lanes: int) -> None:
        self._lanes = tuple(asyncio.Lock() for _ in range(lanes))
        self._clients: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()  # and lanes
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, lane: int, client: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs `work` at the client's turn and returns its result. Work that has begun keeps the lane to its end, even
        if its client stops waiting."""
        async with self._clients.setdefault((client, lane), asyncio.Lock()):
            turn = self._lanes[lane]
            await turn.acquire()
            running = asyncio.create_task(work())
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            running.add_done_callback(lambda _: turn.release())
            return await asyncio.shield(running)
