"""The timer of launches: it fires once after each start, and never for a time that was forgotten."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.engine.punctual_timer import PunctualTimer

DEADLINE_S = 60.0


class Fired:
    """Counts firings; `timer` is open inside `opened`."""

    timer: PunctualTimer

    def __init__(self) -> None:
        self.times: list[float] = []
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self._event.set()

    async def next(self) -> float:
        async with asyncio.timeout(DEADLINE_S):
            await self._event.wait()
        self._event.clear()
        return self.times[-1]


@asynccontextmanager
async def opened() -> AsyncIterator[Fired]:
    fired = Fired()
    fired.timer = PunctualTimer(fired)
    try:
        yield fired
    finally:
        fired.timer.close()


async def test_it_fires_once_after_each_start_and_not_before_its_time() -> None:
    async with opened() as fired:
        for delay_s in (0.003, 1e-9, 0.0015):
            began_s = asyncio.get_running_loop().time()
            fired.timer.start(delay_s)
            assert await fired.next() >= began_s + delay_s
        assert len(fired.times) == 3


async def test_a_time_that_was_stopped_or_replaced_is_forgotten() -> None:
    async with opened() as fired:
        fired.timer.start(1e-9)
        fired.timer.stop()
        fired.timer.start(1e-9)
        fired.timer.start(3600.0)
        fired.timer.start(0.002)
        await fired.next()
        await asyncio.sleep(0)
        assert len(fired.times) == 1


async def test_one_that_has_fired_but_was_not_served_yet_can_be_started_again() -> None:
    async with opened() as fired:
        fired.timer.start(1e-9)
        served_s = asyncio.get_running_loop().time() + 0.002
        while asyncio.get_running_loop().time() < served_s:  # the loop serves nothing meanwhile
            pass
        fired.timer.start(0.001)
        await fired.next()
        assert len(fired.times) == 1


async def test_it_may_be_started_by_its_own_callback() -> None:
    async with opened() as fired:
        again = [0.001, 0.001]

        def fire() -> None:
            fired()
            if again:
                timer.start(again.pop())

        timer = PunctualTimer(fire)
        timer.start(0.001)
        while len(fired.times) < 3:
            await fired.next()
        timer.close()
