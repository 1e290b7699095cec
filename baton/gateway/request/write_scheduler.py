"""Schedules the writes of streams round robin: every stream gets a turn before any stream gets its next one.

While a stream waits for its turn, its further tokens join its next message. So a process that keeps up delays nothing,
and an overloaded process sends fewer, larger messages. The number of concurrent writes is limited, because gRPC reads
from nodes through the same queue as it writes to clients: with more writes, tokens would wait in that queue, where they
cannot be joined. A request that has ended waits for one more turn before it is cleaned up, so that many requests that
end together do not delay other streams' tokens.
"""

import asyncio
from collections import deque

# Turns per pass of the event loop. Between passes the loop reads from nodes, so that new tokens join the next messages.
_TURNS_PER_PASS = 8
# Without a limit, a token costs three to four times as much at 256 busy gRPC streams; 16, 32 and 64 cost the same.
_WRITES_MAX = 64
# A write that takes longer waits for a slow client, not for this process, and no longer counts.
SLOW_S = 0.02


class WriteScheduler:
    """Schedules the turns of one event loop. Must be created on that loop.

    Attributes:
        round: number of the present round.
    """

    def __init__(self) -> None:
        self.round = 1
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a turn of this round
        self._for_next: deque[asyncio.Future[None]] = deque()  # streams that have had a turn in this round
        self._left = _TURNS_PER_PASS  # turns left in this pass of the loop
        self._scheduled = False
        self._writes = 0  # writes that have begun in this period and not ended
        self._period = 1
        self._timer: asyncio.TimerHandle | None = None  # ends the period; only set while streams wait for a write

    def ask(self, waiter: "asyncio.Future[None]", last: int = 0) -> None:
        """Requests a turn: sets the future's result when the turn comes, perhaps at once. A done future is skipped.

        Args:
            last: round of the stream's last turn.
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
        """Records the begin of a write; returns the period to pass to `end`, negative for a write that is not counted.

        Args:
            slow: result of `end` for the stream's last message; writes to slow clients are not counted.
        """
        if slow:
            return -self._period
        self._writes += 1
        return self._period

    def end(self, period: int) -> bool:
        """Records the end of a write, successful or not. Returns whether the client is slow."""
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
            self._timer = self._loop.call_later(SLOW_S, self._end_period)

    def _end_period(self) -> None:
        self._timer = None
        if self._waiting or self._for_next:
            self._writes = 0
            self._period += 1
            self._schedule()
