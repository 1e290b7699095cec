"""Who gets the next free blocks: first come, first served, within each request's own patience."""

import asyncio
from collections.abc import Callable

from baton.errors import Overloaded
from engine.request import EngineRequest, Reservation

_RETRY_AFTER_S = 1.0


class Room:
    """Reserves blocks for requests in the order in which they came.

    Args:
        reserve: takes the blocks or raises Overloaded.
        waiting_max: how many requests may wait; more are refused at once.
    """

    def __init__(self, reserve: Callable[[EngineRequest], Reservation], *, waiting_max: int) -> None:
        self._reserve = reserve
        self._waiting_max = waiting_max
        self._turn = asyncio.Lock()  # its waiters are served in order
        self._freed = asyncio.Event()
        self.waiting = 0

    def freed(self) -> None:
        """Blocks may have become free."""
        self._freed.set()

    async def reserve(self, request: EngineRequest, *, queue_s: float) -> Reservation:
        """The request's blocks, as soon as there is room and everybody before has been served.

        Raises:
            Overloaded: no room within queue_s, or too many wait already.
            InvalidRequest: no amount of waiting will make room for it.
        """
        if self.waiting >= self._waiting_max:
            raise Overloaded(f"{self.waiting} requests wait for room already", retry_after_s=_RETRY_AFTER_S)
        self.waiting += 1
        try:
            async with asyncio.timeout(queue_s if self.waiting > 1 or queue_s > 0 else None):
                async with self._turn:
                    return await self._wait(request, patient=queue_s > 0)
        except TimeoutError:
            raise Overloaded(f"no room within {queue_s:g} s", retry_after_s=_RETRY_AFTER_S) from None
        finally:
            self.waiting -= 1

    async def _wait(self, request: EngineRequest, *, patient: bool) -> Reservation:
        while True:
            self._freed.clear()
            try:
                return self._reserve(request)
            except Overloaded:
                if not patient:
                    raise
            await self._freed.wait()
