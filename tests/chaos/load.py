"""The clients of a run: each sends one request after the other, and records what it gets."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from baton.client.client import AsyncClient
from baton.client.outputs import Event, Finished, Notice
from baton.core.errors import BatonError, InternalError
from tests.chaos.history import Asked, End, Ended, History, Received
from tests.chaos.scenario import Load
from tests.chaos.works import Answer, Work

UNTYPED = "untyped"


@dataclass
class Asker:
    """Sends requests and records them.

    Attributes:
        running: the requests that have not ended, by number.
    """

    history: History
    running: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def ask(
        self,
        client: AsyncClient,
        work: Work,
        *,
        deadline_s: float | None = None,
        cancel_after: int | None = None,
        salt: str = "",
        priority: int = 0,
    ) -> Ended:
        """Returns how it ended."""
        number, now_s = next(self._numbers), self.history.now_s
        self.history.add(Asked(now_s(), number, work.name, deadline_s, cancel_after))
        events = client.generate(
            work.prompt, work.sampling, n=work.outputs, timeout_s=deadline_s, cache_salt=salt, priority=priority
        )  # fmt: skip
        task = asyncio.current_task()
        assert task is not None
        self.running[number] = task
        try:
            ended = await self._read(number, events, cancel_after)
        except asyncio.CancelledError:
            ended = Ended(now_s(), number, End.HUNG)
            raise
        except BatonError as error:
            # `InternalError` is also what an exception becomes that no code expected.
            name = UNTYPED if isinstance(error, InternalError) else error.reason
            ended = Ended(now_s(), number, End.FAILED, name, f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  the checker reports it
            ended = Ended(now_s(), number, End.FAILED, UNTYPED, f"{type(error).__name__}: {error}")
        finally:
            del self.running[number]
            self.history.add(ended)
        return ended

    async def _read(self, number: int, events: AsyncGenerator[Event, None], cancel_after: int | None) -> Ended:
        now_s = self.history.now_s
        tokens, attempts, path = 0, 0, ""
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Notice):
                    continue
                tokens += len(event.tokens)
                self.history.add(_received(now_s(), number, event))
                if isinstance(event, Finished):
                    attempts, path = event.receipt.attempts, event.receipt.path.value
                elif cancel_after is not None and tokens >= cancel_after:
                    return Ended(now_s(), number, End.CANCELLED)
        return Ended(now_s(), number, End.FINISHED, attempts=attempts, path=path)


async def send_load(
    asker: Asker, addresses: Sequence[str], works: Sequence[Work], load: Load, *, seed: int, until: asyncio.Event
) -> None:
    """Sends until the event is set; returns when the last requests have ended."""
    async with (
        AsyncClient(addresses=addresses, retry_s=0.0) as first,
        AsyncClient(addresses=addresses[::-1], retry_s=0.0) as second,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(load.clients):
            client = (first, second)[number % 2]
            tasks.create_task(_send(asker, client, works, load, Random(f"{seed} {number}"), until))


async def _send(
    asker: Asker, client: AsyncClient, works: Sequence[Work], load: Load, random: Random, until: asyncio.Event
) -> None:
    while not until.is_set():
        draw = random.random()
        work = random.choice(works)
        ended = await asker.ask(
            client,
            work,
            deadline_s=random.uniform(*load.deadline_s) if draw < load.with_deadline else None,
            cancel_after=random.randint(1, 8) if draw > 1 - load.cancelled else None,
            # Half of the prompts are in no cache.
            salt=random.choice(("", str(random.random()))),
            priority=random.choice((0, 0, 0, -1, 1)),
        )
        # A client that was refused waits, as the errors ask it to.
        pause_s = load.refused_pause_s if ended.how is End.FAILED else load.pause_s
        pause = asyncio.create_task(asyncio.sleep(pause_s * random.random()))
        ending = asyncio.create_task(until.wait())
        await asyncio.wait([pause, ending], return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        ending.cancel()


async def answers_of(address: str, works: Sequence[Work]) -> dict[str, tuple[Answer, ...]]:
    """The answers of one process: each work alone, and all at once, which must be equal. A work whose answer depends on
    its neighbours is left out: its tokens are too close to each other for any checker."""
    async with AsyncClient(address) as client:
        alone = [await _answer(client, work) for work in works]
        together = await asyncio.gather(*(_answer(client, work) for work in works))
    return {
        work.name: one
        for work, one, other in zip(works, alone, together, strict=True)
        if [(each.token_ids, each.text) for each in one] == [(each.token_ids, each.text) for each in other]
    }


async def _answer(client: AsyncClient, work: Work) -> tuple[Answer, ...]:
    outputs: dict[int, list[Received]] = {}
    async for event in client.generate(work.prompt, work.sampling, n=work.outputs):
        if not isinstance(event, Notice):
            received = _received(0.0, 0, event)
            outputs.setdefault(received.output, []).append(received)
    return tuple(joined(outputs)[index] for index in range(work.outputs))


def joined(outputs: Mapping[int, Sequence[Received]]) -> dict[int, Answer]:
    """What a client has of each output."""
    return {
        index: Answer(
            token_ids=tuple(token for each in pieces for token in each.token_ids),
            text="".join(each.text for each in pieces),
            finish_reason="".join(each.finish_reason for each in pieces),
            logprobs=tuple(logprob for each in pieces for logprob in each.logprobs),
        )
        for index, pieces in outputs.items()
    }


def _received(at_s: float, number: int, event: Event) -> Received:
    assert not isinstance(event, Notice)
    return Received(
        at_s,
        number,
        event.index,
        tuple(token.index for token in event.tokens),
        tuple(token.token_id for token in event.tokens),
        event.text,
        tuple(token.logprob for token in event.tokens if token.logprob is not None),
        event.finish_reason.value if isinstance(event, Finished) else "",
    )
