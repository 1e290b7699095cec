"""Many large texts are tokenized little by little, and small texts do not wait for them."""

import asyncio
from threading import Event, Lock

import pytest

from baton.core.errors import Overloaded
from baton.gateway.text.text_work import _SMALL_BYTES, TextWork, text_budget

BOUND_S = 60.0
LARGE = 2 * _SMALL_BYTES


class Crowd:
    """Works that go on until the test lets them, and how many of them run at once."""

    def __init__(self, work: TextWork) -> None:
        self.may_end = Event()
        self.running = self.most = 0
        self.order: list[int] = []
        self._work = work
        self._counting = Lock()

    def start(self, number: int, size_bytes: int = LARGE) -> "asyncio.Task[int]":
        return asyncio.create_task(self._work.run(size_bytes, lambda: self._run(number)))

    def _run(self, number: int) -> int:
        with self._counting:
            self.order.append(number)
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.may_end.wait(BOUND_S)
        with self._counting:
            self.running -= 1
        return number

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.running < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_only_so_many_bytes_of_large_texts_are_worked_on_at_once_in_their_order() -> None:
    crowd = Crowd(TextWork(running_bytes=2 * LARGE))
    tasks = [crowd.start(number) for number in range(6)]
    await crowd.until_running(2)
    crowd.may_end.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks), BOUND_S) == list(range(6))
    assert crowd.most == 2
    assert sorted(crowd.order[:2]) == [0, 1]


async def test_a_small_text_passes_a_crowd_of_large_ones() -> None:
    crowd = Crowd(TextWork(running_bytes=LARGE, held_bytes=3 * LARGE))
    tasks = [crowd.start(number) for number in range(3)]
    await crowd.until_running(1)
    assert await asyncio.wait_for(crowd._work.run(_SMALL_BYTES, lambda: "small"), BOUND_S) == "small"
    assert not any(task.done() for task in tasks)
    crowd.may_end.set()
    await asyncio.gather(*tasks)


async def test_a_text_larger_than_the_budget_is_worked_on_alone() -> None:
    crowd = Crowd(TextWork(running_bytes=LARGE, held_bytes=LARGE))
    crowd.may_end.set()
    assert await asyncio.wait_for(crowd.start(1, 100 * LARGE), BOUND_S) == 1


async def test_beyond_the_bytes_that_may_wait_texts_are_refused_with_a_hint() -> None:
    crowd = Crowd(TextWork(running_bytes=LARGE, held_bytes=3 * LARGE))
    tasks = [crowd.start(number) for number in range(3)]
    await crowd.until_running(1)
    with pytest.raises(Overloaded) as refused:
        await crowd.start(3)
    assert refused.value.retry_after_s
    crowd.may_end.set()
    await asyncio.gather(*tasks)
    assert await asyncio.wait_for(crowd.start(4), BOUND_S) == 4


async def test_a_request_that_is_cancelled_while_its_text_waits_leaves_its_place() -> None:
    crowd = Crowd(TextWork(running_bytes=LARGE, held_bytes=2 * LARGE))
    first, second = crowd.start(1), crowd.start(2)
    await crowd.until_running(1)
    second.cancel()
    await asyncio.wait([second])
    third = crowd.start(3)
    crowd.may_end.set()
    assert list(await asyncio.wait_for(asyncio.gather(first, third), BOUND_S)) == [1, 3]
    assert crowd.order == [1, 3]


async def test_a_thread_that_nobody_waits_for_any_more_still_counts() -> None:
    crowd = Crowd(TextWork(running_bytes=LARGE))
    first = crowd.start(1)
    await crowd.until_running(1)
    first.cancel()
    await asyncio.wait([first])
    second = crowd.start(2)
    await asyncio.sleep(0)
    assert (crowd.running, crowd.order) == (1, [1])
    crowd.may_end.set()
    assert await asyncio.wait_for(second, BOUND_S) == 2
    assert crowd.most == 1


async def test_what_raises_raises_and_leaves_its_place() -> None:
    work = TextWork(running_bytes=LARGE)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(work.run(LARGE, lambda: 1 // 0), BOUND_S)


def test_a_small_container_holds_fewer_texts_and_workers_share_what_it_has() -> None:
    mib = 1 << 20
    assert text_budget(512 * mib, processes=1) == 64 * mib
    assert text_budget(512 * mib, processes=4) == 16 * mib
    assert text_budget(64 << 30, processes=4) == 256 * mib
