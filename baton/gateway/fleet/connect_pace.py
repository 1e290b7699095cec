"""How fast one process tries to reach addresses that do not answer, so that a list of wrong ones costs it little.

An address that has answered before is tried at once. All others take turns, and a turn that failed is taken again only
after a while.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

# An attempt takes a descriptor, for some seconds where packets are lost or a server of another kind answers.
_TURNS = 32
_REST_S = 1.0
# Of retries. An attempt costs about 2 ms of CPU time.
_RETRIES_PER_S = 25.0
# Connections on which nothing has come yet: of nodes whose interpreters are busy, or of servers of another kind.
_UNANSWERED_MAX = 256


class ConnectPace:
    """Attributes:
    silent: how many addresses do not answer now.
    unanswered: open connections to addresses that have never answered.
    """

    def __init__(self) -> None:
        self.silent = 0
        self.unanswered = 0
        self._turns = asyncio.Semaphore(_TURNS)

    def pause_s(self, pause_s: float) -> float:
        """The pause before the next attempt at an address that does not answer: longer, the more of them there are."""
        return pause_s * max(1.0, self.silent / _RETRIES_PER_S)

    @property
    def crowded(self) -> bool:
        """Whether no further connection may wait for its first answer longer than a turn takes."""
        return self.unanswered >= _UNANSWERED_MAX

    @contextmanager
    def waiting(self, *, answered: bool) -> Iterator[None]:
        """The block waits for an answer without a turn."""
        self.unanswered += not answered
        try:
            yield
        finally:
            self.unanswered -= not answered

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
