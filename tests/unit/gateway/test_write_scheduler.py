"""Streams get their turns in the order in which they ask, some in each pass of the loop, while few messages wait."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from baton.gateway.request import write_scheduler
from baton.gateway.request.write_scheduler import _TURNS_PER_PASS, _WRITES_MAX, WriteScheduler

BOUND_S = 60.0
MESSAGE_S, TOKEN_S = 50e-6, 5e-6  # of the process, for a message and for each of its tokens
PASS_S = 10e-6
SECONDS = 1.0


async def one_pass() -> None:
    await asyncio.sleep(0)


async def test_a_stream_of_an_idle_process_gets_its_turn_at_once() -> None:
    turns, waiter = WriteScheduler(), asyncio.get_running_loop().create_future()
    turns.ask(waiter)
    assert waiter.done()


async def test_further_streams_wait_for_the_next_pass_in_their_order() -> None:
    turns, loop = WriteScheduler(), asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(3 * _TURNS_PER_PASS)]
    for waiter in waiters:
        turns.ask(waiter)
    for passes in (1, 2, 3):
        assert [waiter.done() for waiter in waiters].index(False) == passes * _TURNS_PER_PASS if passes < 3 else True
        assert sum(waiter.done() for waiter in waiters) == passes * _TURNS_PER_PASS
        await one_pass()


async def test_a_stream_that_waits_no_more_takes_no_turn() -> None:
    turns, loop = WriteScheduler(), asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(2 * _TURNS_PER_PASS + 1)]
    for waiter in waiters:
        turns.ask(waiter)
    waiters[_TURNS_PER_PASS].cancel()
    await one_pass()
    assert all(waiter.done() for waiter in waiters)


async def test_an_idle_loop_gives_all_turns_again() -> None:
    turns, loop = WriteScheduler(), asyncio.get_running_loop()
    for _ in range(_TURNS_PER_PASS):
        turns.ask(loop.create_future())
    for _ in range(3):
        await one_pass()
    waiters = [loop.create_future() for _ in range(_TURNS_PER_PASS)]
    for waiter in waiters:
        turns.ask(waiter)
    assert all(waiter.done() for waiter in waiters)


# ---- writes that wait


async def asked(turns: WriteScheduler, count: int) -> "list[asyncio.Future[None]]":
    """Futures of streams that ask one by one, in passes of the loop, once all passes are over."""
    waiters = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for waiter in waiters:
        turns.ask(waiter)
    for _ in range(count):
        await one_pass()
    return waiters


async def test_while_many_messages_are_on_their_way_no_stream_gets_a_turn_until_one_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write_scheduler, "SLOW_S", BOUND_S)
    turns = WriteScheduler()
    periods = [turns.begin(slow=False) for _ in range(_WRITES_MAX)]
    waiters = await asked(turns, 3)
    assert not any(waiter.done() for waiter in waiters)
    assert turns.end(periods[0]) is False
    await one_pass()
    assert [waiter.done() for waiter in waiters] == [True, False, False]


async def test_messages_that_wait_for_their_clients_hold_up_the_others_for_a_moment_only() -> None:
    turns = WriteScheduler()
    periods = [turns.begin(slow=False) for _ in range(_WRITES_MAX)]
    waiters = await asked(turns, 3)
    await asyncio.wait_for(asyncio.gather(*waiters), BOUND_S)
    assert all(turns.end(period) for period in periods), "their clients are slow"


async def test_nobody_waits_for_the_next_messages_of_slow_clients() -> None:
    turns = WriteScheduler()
    for _ in range(_WRITES_MAX):
        turns.begin(slow=True)
    (waiter,) = await asked(turns, 1)
    assert waiter.done()


async def test_a_slow_client_that_reads_again_is_slow_no_more() -> None:
    turns = WriteScheduler()
    assert turns.end(turns.begin(slow=True)) is False


# ---- many streams, with a set clock


class SetClock(asyncio.SelectorEventLoop):
    """A loop whose time is what the test sets; an idle loop moves it to its next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def select_at_once(timeout_s: float | None) -> list[object]:
            self.now_s += timeout_s or 0.0
            return list(select(0))

        self._selector.select = select_at_once  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now_s


@dataclass
class Stream:
    """As a request's driver: asks for a turn with its first waiting token, and writes all that wait."""

    turns: WriteScheduler
    write: Callable[[int], Awaitable[None]]
    waiting: int = 0
    waiter: "asyncio.Future[None] | None" = None
    round: int = 0
    written_at_s: list[float] = field(default_factory=list)

    def token(self) -> None:
        self.waiting += 1
        if self.waiting == 1 and self.waiter is not None:
            self.turns.ask(self.waiter, self.round)

    async def run(self, clock: SetClock) -> None:
        slow = False
        while True:
            self.waiter = clock.create_future()
            if self.waiting:
                self.turns.ask(self.waiter, self.round)
            await self.waiter
            self.waiter, self.round, tokens, self.waiting = None, self.turns.round, self.waiting, 0
            period = self.turns.begin(slow=slow)
            await self.write(tokens)
            slow = self.turns.end(period)
            self.written_at_s.append(clock.now_s)

    @property
    def longest_pause_s(self) -> float:
        return max(later - earlier for earlier, later in pairwise(self.written_at_s))


async def overload(clock: SetClock, *, streams: int, slow: int, seconds: float) -> list[Stream]:
    """Tokens for all streams come twice as fast as the process could send them one by one. The first `slow` streams'
    clients take a message in each 0.2 s. Messages are written in the order in which they were begun."""
    turns = WriteScheduler()
    begun: deque[asyncio.Future[None]] = deque()

    async def write(tokens: int) -> None:
        clock.now_s += MESSAGE_S + TOKEN_S * tokens
        begun.append(clock.create_future())
        await begun[-1]

    async def write_slowly(tokens: int) -> None:
        clock.now_s += MESSAGE_S + TOKEN_S * tokens
        await asyncio.sleep(0.2)

    every = [Stream(turns, write_slowly if number < slow else write) for number in range(streams)]
    tasks = [clock.create_task(stream.run(clock)) for stream in every]
    step_s, due_s = streams * (MESSAGE_S + TOKEN_S) / 2, 0.0
    await one_pass()
    while clock.now_s < seconds:
        if clock.now_s >= due_s:  # one message of the node at a time is read
            due_s += step_s
            for stream in every:
                stream.token()
        if begun:
            begun.popleft().set_result(None)
        elif not any(stream.waiting for stream in every):
            clock.now_s = max(clock.now_s, due_s)
        await one_pass()
        clock.now_s += PASS_S
    for task in tasks:
        task.cancel()
    return every


@pytest.mark.parametrize("slow", [0, 100])
def test_of_512_streams_at_twice_the_capacity_none_pauses_for_much_more_than_its_share(slow: int) -> None:
    with asyncio.Runner(loop_factory=SetClock) as runner:
        clock = runner.get_loop()
        assert isinstance(clock, SetClock)
        streams = runner.run(overload(clock, streams=512, slow=slow, seconds=SECONDS))
    fast = streams[slow:]
    shares_s = [SECONDS / len(stream.written_at_s) for stream in fast]
    assert max(stream.longest_pause_s for stream in fast) < max(shares_s) + 0.1
    assert max(shares_s) < 1.3 * min(shares_s)
