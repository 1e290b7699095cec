"""Turns of streams that have something to send, in rounds: each gets one before any gets its next.

While a stream waits for its turn, more of its tokens come and join its next message. So nothing is held back while the
process keeps up, and a process that does not sends fewer, larger messages. It keeps up as long as few messages are on
their way at once: gRPC reads what nodes send through the same queue as it writes, so that more of them would keep the
next tokens waiting there, where they join nothing. A request that has ended waits for one more turn before its books
are closed, so that many that end together hold up nobody's tokens.
"""

import asyncio
from collections import deque

# Turns between two looks at the sockets: what nodes send meanwhile is read in time, and joins the next messages.
_TURNS_PER_PASS = 8
# Without a limit a token costs three to four times as much at 256 busy gRPC streams; 16, 32 and 64 cost the same.
_WRITES_MAX = 64
# After that time a message waits for its client, and for the process no more.
_SLOW_S = 0.02


class WriteScheduler:
    """Gives out the turns of one event loop, on which it must be created.

    Attributes:
        round: the present one.
    """

    def __init__(self) -> None:
        self.round = 1
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a turn of this round
        self._for_next: deque[asyncio.Future[None]] = deque()  # of streams that have had theirs
        self._left = _TURNS_PER_PASS  # in this pass of the loop
        self._scheduled = False
        self._writes = 0  # that have begun in this period and have not ended
        self._period = 1
        self._timer: asyncio.TimerHandle | None = None  # ends the period; only set while streams wait for a write's end

    def ask(self, waiter: "asyncio.Future[None]", last: int = 0) -> None:
        """Sets the future's result when it is its turn, perhaps at once. One that is done by then takes no turn.

        Args:
            last: the round of the stream's last turn.
        """
        if not self._left or self._waiting or self._for_next or self._writes >= _WRITES_MAX:
            (self._for_next if last == self.round else self._waiting).append(waiter)
            if not self._scheduled:
                self._await_write()
            return
        if waiter.done():
            return
        self._left -= 1
        waiter.set_result(None)
        self._schedule()

    def begin(self, *, slow: bool) -> int:
        """A stream begins to write; returns the period for `end`, which is negative where no other stream waits for it.

        Args:
            slow: what `end` returned for its last message.
        """
        if slow:
            return -self._period
        self._writes += 1
        return self._period

    def end(self, period: int) -> bool:
        """The message is written, or never will be. Returns whether the client is slow."""
        if period == self._period:
            self._writes -= 1
            if self._waiting or self._for_next:
                self._schedule()
            return False
        return period != -self._period

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pass)

    def _pass(self) -> None:
        most = min(_TURNS_PER_PASS, _WRITES_MAX - self._writes)
        given = 0
        while given < most:
            if not self._waiting:
                if not self._for_next:
                    break
                self._waiting, self._for_next = self._for_next, self._waiting
                self.round += 1
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                given += 1
        self._left = _TURNS_PER_PASS - given
        self._scheduled = False
        if given:
            self._schedule()
        elif self._waiting or self._for_next:
            self._await_write()

    def _await_write(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_SLOW_S, self._end_period)

    def _end_period(self) -> None:
        self._timer = None
        if self._waiting or self._for_next:
            self._writes = 0
            self._period += 1
            self._schedule()
