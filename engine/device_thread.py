"""The one thread that runs steps on the device. Messages in, messages out; shares no state with the event loop.

Knows neither scheduler nor requests. An exception of a step comes back as a message, and the thread goes on.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from types import TracebackType

from baton.types import TokenOutput
from engine.batch import Batch
from engine.runner import ModelRunner


@dataclass(frozen=True)
class StepDone:
    """`tokens` has one entry per row of the batch, None where nothing was sampled."""

    tokens: list[TokenOutput | None]
    seconds: float


@dataclass(frozen=True)
class StepRaised:
    error: Exception
    seconds: float


@dataclass(frozen=True)
class _Job:
    batch: Batch
    answer: asyncio.Future[StepDone | StepRaised]


class DeviceThread:
    """Async context manager: the thread lives from entry to exit; exit waits for the step that runs."""

    def __init__(self, runner: ModelRunner, *, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="device", daemon=True)

    async def __aenter__(self) -> "DeviceThread":
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    async def run(self, batch: Batch) -> StepDone | StepRaised:
        """Runs one step. A caller that is cancelled does not stop the step."""
        answer: asyncio.Future[StepDone | StepRaised] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(batch, answer))
        return await answer

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            outcome = self._step(job.batch)
            job.answer.get_loop().call_soon_threadsafe(_settle, job.answer, outcome)

    def _step(self, batch: Batch) -> StepDone | StepRaised:
        start_s = self._clock()
        try:
            tokens = self._runner.run(batch)
        except Exception as error:  # noqa: BLE001  the step's requests are told; the thread serves the others
            return StepRaised(error, self._clock() - start_s)
        return StepDone(tokens, self._clock() - start_s)


def _settle(answer: asyncio.Future[StepDone | StepRaised], outcome: StepDone | StepRaised) -> None:
    if not answer.done():
        answer.set_result(outcome)
