"""Limits how fast one process tries addresses that do not answer, so that a list of wrong addresses costs little.

An address that has answered before is tried at once. All others share a limited number of slots, and the slot of a
failed attempt stays taken for a while.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Each attempt holds a file descriptor, for some seconds where packets are lost or a server of another kind answers.
_SLOTS = 32
_SLOT_REST_S = 1.0
_RETRIES_PER_S = 25.0  # an attempt costs about 2 ms of CPU time


class ConnectPace:
    """Spaces attempts to connect, so that many silent addresses do not occupy the process.

    Attributes:
        silent: number of addresses that do not answer now.
    """

    def __init__(self) -> None:
        self.silent = 0
        self._slots = asyncio.Semaphore(_SLOTS)

    def pause_s(self, pause_s: float) -> float:
        """The pause before the next attempt at a silent address. It grows with the number of such addresses."""
        return pause_s * max(1.0, self.silent / _RETRIES_PER_S)

    @asynccontextmanager
    async def turn(self, *, answered: bool) -> AsyncIterator[None]:
        """Context manager around one attempt: waits until it may begin. The block must raise if the attempt fails.

        Args:
            answered: whether the address has answered before.
        """
        if answered:
            yield
            return
        await self._slots.acquire()
        try:
            yield
        except BaseException:
            asyncio.get_running_loop().call_later(_SLOT_REST_S, self._slots.release)
            raise
        self._slots.release()
