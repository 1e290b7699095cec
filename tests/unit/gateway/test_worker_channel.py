"""Both ends of a worker channel ask and answer at any time; an end that is gone answers nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.gateway.process.relay import Relay
from baton.gateway.process.worker_channel import Message, WorkerChannel

BOUND_S = 60.0  # however long a busy machine takes for an answer


@asynccontextmanager
async def lines(count: int = 2) -> AsyncIterator[tuple[list[WorkerChannel], list["asyncio.Task[None]"]]]:
    """Two ends, each of which answers with its own number and what it was asked."""

    def answering(number: int) -> WorkerChannel:
        async def answer(question: Message) -> Message:
            if question.get("slow"):
                await asyncio.sleep(0)
            return {"from": number, "asked": question["what"]}

        return WorkerChannel(ends[number], answer)

    ends = socket.socketpair()
    both = [answering(number) for number in range(count)]
    running = [asyncio.create_task(line.run()) for line in both]
    yield both, running
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_each_end_gets_the_answer_to_its_own_question() -> None:
    async with lines() as ((first, second), _):
        answers = await asyncio.gather(
            first.ask({"what": "a", "slow": True}, within_s=BOUND_S),
            first.ask({"what": "b"}, within_s=BOUND_S),
            second.ask({"what": "c"}, within_s=BOUND_S),
        )
    assert list(answers) == [{"from": 1, "asked": "a"}, {"from": 1, "asked": "b"}, {"from": 0, "asked": "c"}]


async def test_a_question_to_an_end_that_goes_away_has_no_answer() -> None:
    async with lines() as ((first, _), (_, other)):
        await first.ask({"what": "are you there"}, within_s=BOUND_S)
        asked = asyncio.create_task(first.ask({"what": "a", "slow": True}, within_s=BOUND_S))
        await asyncio.sleep(0)
        other.cancel()
        assert await asked is None


async def test_a_line_ends_with_its_other_end() -> None:
    async with lines() as (_, (one, other)):
        await asyncio.sleep(0)
        other.cancel()
        await one


async def test_a_question_whose_asker_leaves_is_forgotten() -> None:
    """Clients leave while a slow worker is asked, and each would leave a future behind."""
    async with lines() as ((first, _), _):
        asked = asyncio.create_task(first.ask({"what": "a", "slow": True}, within_s=BOUND_S))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert not vars(first)["_pending"]


async def test_a_worker_that_starts_is_not_asked() -> None:
    """It knows no request and no stored answer, and answers only once it has read the model's files."""

    async def nothing(question: Message) -> Message:
        return {}

    async with lines() as ((first, second), _):
        relay, (ours, theirs) = Relay(), socket.socketpair()
        with ours, theirs:
            for row, channel in enumerate((first, second, WorkerChannel(ours, nothing))):
                relay.add(row, channel)
            relay.ready |= {0, 1}
            asking = relay.ask_others(1, {"what": "a"}, within_s=3600.0)
            assert await asyncio.wait_for(asking, BOUND_S) == [{"from": 1, "asked": "a"}]
