"""How fast one process tries to reach addresses that do not answer, so that a list of wrong ones costs it little.

An address that has answered before is tried at once. All others take turns, and a turn that failed is taken again only
after a while.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# An attempt takes a descriptor, for some seconds where packets are lost or a server of another kind answers.
_TURNS = 32
_REST_S = 1.0
# Of retries. An attempt costs about 2 ms of CPU time.
_RETRIES_PER_S = 25.0


class ConnectPace:
    """Spaces attempts to connect, so that many silent addresses do not take the process.

    Attributes:
        silent: how many addresses do not answer now.
    """

    def __init__(self) -> None:
        self.silent = 0
        self._turns = asyncio.Semaphore(_TURNS)

    def pause_s(self, pause_s: float) -> float:
        """The pause before the next attempt at an address that does not answer: longer, the more of them there are."""
        return pause_s * max(1.0, self.silent / _RETRIES_PER_S)

    @asynccontextmanager
    async def turn(self, *, answered: bool) -> AsyncIterator[None]:
        """Waits until an attempt may begin, which is what the block does; it raises if the attempt fails.

        Args:
            answered: the address has answered before.
        """
        if answered:
            yield
            return
        await self._turns.acquire()
        try:
            yield
        except BaseException:
            asyncio.get_running_loop().call_later(_REST_S, self._turns.release)
            raise
        self._turns.release()
