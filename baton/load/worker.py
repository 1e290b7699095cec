"""A client process: sends its part of a plan on time, and records what comes back.

It also measures itself, because a client that is late or busy measures its own delays: how late requests were sent, how
late the event loop woke up, and how much of a core the process used.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from baton.core.types import Slo
from baton.load.answer import Asker, AskError, LoadAnswer
from baton.load.goals import Goal
from baton.load.records import LoadOutcome, LoadRecord
from baton.load.target import Server
from baton.load.workload import PlannedRequest

_PROGRESS_S = 0.2
_LAG_PROBE_S = 0.02


@dataclass(frozen=True)
class LoadJob:
    """The work of one process in one run.

    Args:
        start: start of the run by `time.monotonic`, which all processes of a machine share.
        timeout_s: time limit of each request.
        end_s: when requests that still run are given up, after the start.
        goals: goals whose misses are reported during the run.
    """

    server: Server
    planned: Sequence[PlannedRequest]
    start: float
    timeout_s: float
    end_s: float
    connections: int = 4
    slo: Slo | None = None
    temperature: float | None = None
    goals: Sequence[Goal] = ()


@dataclass(frozen=True)
class Stop:
    """The parent's message that the run's result is known, so the rest of the run is not needed."""


@dataclass(frozen=True)
class WorkerProgress:
    """The progress of a job; `missed` has, for each goal, the number of counted requests that can no longer meet it."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    missed: tuple[int, ...] = ()

    def __add__(self, other: "WorkerProgress") -> "WorkerProgress":
        missed = tuple(map(sum, zip_longest(self.missed, other.missed, fillvalue=0)))
        return WorkerProgress(self.sent + other.sent, self.ended + other.ended, self.failed + other.failed, missed)


@dataclass(frozen=True)
class Strain:
    """The load of a client process itself.

    Args:
        lag_p99_s: how late the event loop ran a timer.
        cpu_share: share of one core that it used while requests were sent.
    """

    lag_p99_s: float
    cpu_share: float


@dataclass(frozen=True)
class LoadDone:
    records: list[LoadRecord]
    strain: Strain


@dataclass
class LoadSender:
    """Runs one job."""

    job: LoadJob
    asker: Asker
    report: Callable[[WorkerProgress], None]
    records: list[LoadRecord] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _running: dict[int, tuple[float, LoadAnswer]] = field(default_factory=dict)  # counted ones: when due
    _missed: list[int] = field(default_factory=list)  # of requests that have ended
    _sent: int = 0
    _failed: int = 0
    _lags: list[float] = field(default_factory=list)

    async def run(self) -> LoadDone:
        job = self.job
        self._missed = [0] * len(job.goals)
        watching: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._report()),
            asyncio.create_task(self._probe_lag()),
        ]
        cpu = time.process_time()
        try:
            running = await self._send_all()
            cpu_share = (time.process_time() - cpu) / max(1e-3, time.monotonic() - job.start)
            ended = asyncio.gather(*running)
            stopped = asyncio.create_task(self.stopped.wait())
            watching.append(stopped)
            either: list[asyncio.Future[Any]] = [ended, stopped]
            left_s = max(0.0, job.start + job.end_s - time.monotonic())
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()
            await ended
        finally:
            for watch in watching:
                watch.cancel()
            await self.asker.close()
        lag = float(np.quantile(self._lags, 0.99)) if self._lags else 0.0
        return LoadDone(self.records, Strain(lag, cpu_share))

    async def _send_all(self) -> list[asyncio.Task[None]]:
        tasks = []
        for request in self.job.planned:
            prepared = self.asker.prepare(request)
            due = self.job.start + request.at_s
            if await self._stopped_before(due):
                break
            tasks.append(asyncio.create_task(self._ask(request, prepared, due)))
            self._sent += 1
        await asyncio.sleep(0)  # the last one is sent before its CPU time is taken
        return tasks

    async def _stopped_before(self, due: float) -> bool:
        wait_s = due - time.monotonic()
        if wait_s <= 0:
            await asyncio.sleep(0)
            return self.stopped.is_set()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.stopped.wait()
        return self.stopped.is_set()

    async def _ask(self, request: PlannedRequest, prepared: object, due: float) -> None:
        """Sends a request and records it; if it is cancelled, as one that did not finish."""
        answer, late_s = LoadAnswer(), time.monotonic() - due
        outcome, kind, detail = LoadOutcome.OK, "", ""
        if request.counted:
            self._running[request.index] = (due, answer)
        try:
            async with asyncio.timeout(self.job.timeout_s):
                await self.asker.ask(prepared, answer)
        except AskError as error:
            outcome = LoadOutcome.REFUSED if error.refused else LoadOutcome.FAILED
            kind, detail = error.kind, error.detail
        except TimeoutError:
            outcome, kind, detail = LoadOutcome.FAILED, "Timeout", f"no end within {self.job.timeout_s:g} s"
        except asyncio.CancelledError:
            outcome, kind = LoadOutcome.UNFINISHED, "Unfinished"
        self._failed += outcome is not LoadOutcome.OK
        self._ended(
            LoadRecord(
                index=request.index,
                due_s=request.at_s,
                late_s=late_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                outcome=outcome,
                end_s=time.monotonic() - due,
                error=kind,
                detail=detail,
                times_s=tuple(moment - due for moment in answer.times),
                counts=tuple(answer.counts),
                usage=answer.usage,
                exact=answer.exact,
                request_id=self.job.server.contents.request_id(request.index),
                receipt=answer.receipt,
                counted=request.counted,
            )
        )

    def _ended(self, record: LoadRecord) -> None:
        self.records.append(record)
        if self._running.pop(record.index, None) is not None:
            for place, goal in enumerate(self.job.goals):
                self._missed[place] += not goal.good(record)

    def _late_for(self, goal: Goal) -> int:
        """The number of running requests that have waited for their first token for longer than the goal allows."""
        if goal.ttft_s is None:
            return 0
        latest = time.monotonic() - goal.ttft_s
        return sum(due < latest and not answer.times for due, answer in self._running.values())

    async def _report(self) -> None:
        while True:
            missed = (count + self._late_for(goal) for count, goal in zip(self._missed, self.job.goals, strict=True))
            self.report(WorkerProgress(self._sent, len(self.records), self._failed, tuple(missed)))
            await asyncio.sleep(_PROGRESS_S)

    async def _probe_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_PROBE_S)
            self._lags.append(time.monotonic() - before - _LAG_PROBE_S)


def serve(jobs: Connection) -> None:
    """The main function of a client process: runs one job after the other until its parent closes the connection.

    Sends one WorkerProgress when it is ready. Answers each job with any number of WorkerProgress, then LoadDone or the
    exception that ended the job.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    jobs.send(WorkerProgress())
    while True:
        try:
            job: LoadJob | Stop = jobs.recv()
        except EOFError:
            return
        if isinstance(job, Stop):  # for a job that had ended already
            continue
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                jobs.send(runner.run(_run(job, jobs)))
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001 - the parent raises it
            jobs.send(error)


async def _run(job: LoadJob, jobs: Connection) -> LoadDone:
    asker = job.server.asker(connections=job.connections, slo=job.slo, temperature=job.temperature)

    def report(progress: WorkerProgress) -> None:
        jobs.send(progress)
        # NOTE: not `add_reader`: libuv makes the pipe non-blocking, and later sends and receives of it fail.
        if jobs.poll():  # a Stop, which `serve` takes out, or the parent has ended
            sender.stopped.set()

    sender = LoadSender(job, asker, report)
    return await sender.run()
