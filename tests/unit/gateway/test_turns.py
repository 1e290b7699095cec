"""Streams get their turns in the order in which they ask, some in each pass of the loop."""

import asyncio

from gateway.turns import _TURNS_PER_PASS, Turns


async def one_pass() -> None:
    await asyncio.sleep(0)


async def test_a_stream_of_an_idle_process_gets_its_turn_at_once() -> None:
    turns, waiter = Turns(), asyncio.get_running_loop().create_future()
    turns.ask(waiter)
    assert waiter.done()


async def test_further_streams_wait_for_the_next_pass_in_their_order() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(3 * _TURNS_PER_PASS)]
    for waiter in waiters:
        turns.ask(waiter)
    for passes in (1, 2, 3):
        assert [waiter.done() for waiter in waiters].index(False) == passes * _TURNS_PER_PASS if passes < 3 else True
        assert sum(waiter.done() for waiter in waiters) == passes * _TURNS_PER_PASS
        await one_pass()


async def test_a_stream_that_waits_no_more_takes_no_turn() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    waiters = [loop.create_future() for _ in range(2 * _TURNS_PER_PASS + 1)]
    for waiter in waiters:
        turns.ask(waiter)
    waiters[_TURNS_PER_PASS].cancel()
    await one_pass()
    assert all(waiter.done() for waiter in waiters)


async def test_an_idle_loop_gives_all_turns_again() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()
    for _ in range(_TURNS_PER_PASS):
        turns.ask(loop.create_future())
    for _ in range(3):
        await one_pass()
    waiters = [loop.create_future() for _ in range(_TURNS_PER_PASS)]
    for waiter in waiters:
        turns.ask(waiter)
    assert all(waiter.done() for waiter in waiters)
