"""Turns of streams that have something to send: each gets one before any gets its next.

While a stream waits for its turn, more of its tokens come and join its next message. So nothing is held back while the
process keeps up, and a process that does not sends fewer, larger messages.
"""

import asyncio
from collections import deque

# Turns between two looks at the sockets: what nodes send meanwhile is read in time, and joins the next messages.
_TURNS_PER_PASS = 8


class Turns:
    """Gives out the turns of one event loop, on which it must be created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = _TURNS_PER_PASS  # in this pass of the loop
        self._scheduled = False

    def ask(self, waiter: "asyncio.Future[None]") -> None:
        """Sets the future's result when it is its turn, perhaps at once. One that is done by then takes no turn."""
        if not self._left or self._waiting:
            self._waiting.append(waiter)
            return
        if waiter.done():
            return
        self._left -= 1
        waiter.set_result(None)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        waiting, left = self._waiting, _TURNS_PER_PASS
        while waiting and left:
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                left -= 1
        self._left = left
        self._scheduled = left < _TURNS_PER_PASS
        if self._scheduled:
            self._loop.call_soon(self._pass)
