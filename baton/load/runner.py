"""The client processes of a command, and runs that are divided among them."""

import multiprocessing
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Self

import numpy as np

from baton.core.errors import InternalError
from baton.core.types import Slo
from baton.load.goals import Goal
from baton.load.records import LoadOutcome
from baton.load.results import ClientReport, Run
from baton.load.target import Server
from baton.load.worker import LoadDone, LoadJob, Stop, WorkerProgress, serve
from baton.load.workload import PlannedRequest

_PROCESSES_MAX = 8
_START_S = 0.3  # until every process has its part of the plan and its connections
_WAIT_S = 60.0  # for results, after the time when every request has ended

OnProgress = Callable[[WorkerProgress], None]


def default_processes() -> int:
    """Half of the cores, because a server on the same machine needs the others."""
    return max(1, min(_PROCESSES_MAX, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True)
class RunOptions:
    """The options that all runs of a command share.

    Args:
        timeout_s: time limit of each request.
        drain_s: how long requests may run on after the last one was sent.
        bound_s: see `ClientReport`.
        slo: sent along with each request; None: none.
    """

    workload: str
    timeout_s: float = 600.0
    drain_s: float = 60.0
    bound_s: float = 0.01
    connections: int = 4
    slo: Slo | None = None
    temperature: float | None = None


@dataclass
class Clients:
    """Client processes, ended with the `with` block."""

    count: int
    _processes: list[SpawnProcess] = field(default_factory=list)
    _links: list[Connection] = field(default_factory=list)

    def __enter__(self) -> Self:
        # Not forked: gRPC's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        for number in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), name=f"load-{number}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._links.append(ours)
        for link in self._links:
            _received(link)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for link in self._links:
            link.close()
        for process in self._processes:
            process.join(timeout=2.0 if exc is None else 0.0)
            process.kill()
            process.join()

    def run(
        self,
        server: Server,
        planned: Sequence[PlannedRequest],
        options: RunOptions,
        *,
        rate: float,
        seed: int,
        on_progress: OnProgress = lambda _: None,
        goals: Sequence[Goal] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> Run:
        """Sends a plan, and returns when every request has ended or was given up.

        Args:
            goals: the run ends early once so many of its counted requests have missed every one of them that none can
                be met; empty: it does not.
            stop: the run ends early, without its running requests, once this returns True.

        Raises:
            InternalError: a client process ended.
        """
        # The contents are new in each run: a server may have those of the last one in its cache.
        server = server.with_seed(secrets.randbits(32))
        started, start = datetime.now(UTC), time.monotonic() + _START_S
        end_s = planned[-1].at_s + options.drain_s
        for number, link in enumerate(self._links):
            part = planned[number :: self.count]
            link.send(
                LoadJob(
                    server, part, start, options.timeout_s, end_s, options.connections, options.slo,
                    options.temperature, goals,
                )
            )  # fmt: skip
        counted = sum(request.counted for request in planned)
        missable = [(1 - goal.share) * counted for goal in goals]

        def hopeless(progress: WorkerProgress) -> bool:
            misses = zip(progress.missed, missable, strict=False)
            return bool(progress.missed) and all(missed > limit for missed, limit in misses)

        done = self._collect(start + end_s + _WAIT_S, on_progress, lambda progress: stop() or hopeless(progress))
        records = sorted((record for each in done for record in each.records), key=lambda record: record.index)
        notes = server.notes
        if stop():
            sent = len(records)
            records = [record for record in records if record.outcome is not LoadOutcome.UNFINISHED]
            notes = (
                *notes,
                f"stopped early: {sent} of {len(planned)} requests were sent, {len(records)} of them ended",
            )
        client = ClientReport(
            processes=self.count,
            late_p99_s=float(np.quantile([record.late_s for record in records], 0.99)) if records else 0.0,
            lag_p99_s=max(each.strain.lag_p99_s for each in done),
            cpu_share=max(each.strain.cpu_share for each in done),
            bound_s=options.bound_s,
        )
        target = server.target
        return Run(
            target.label, target.address, target.api.value, server.model, options.workload, rate, seed,
            started.isoformat(timespec="seconds"), client, records, notes,
        )  # fmt: skip

    def _collect(
        self, deadline: float, on_progress: OnProgress, ends_early: Callable[[WorkerProgress], bool]
    ) -> list[LoadDone]:
        progress = [WorkerProgress()] * self.count
        stopped = False
        done: dict[int, LoadDone] = {}
        while len(done) < self.count:
            waiting = {link: number for number, link in enumerate(self._links) if number not in done}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise InternalError("a client process did not answer", cure="see its messages above")
            for link in ready:
                assert isinstance(link, Connection)
                number = waiting[link]
                message = _received(link)
                if isinstance(message, LoadDone):
                    done[number] = message
                elif isinstance(message, WorkerProgress):
                    progress[number] = message
                    whole = sum(progress, WorkerProgress())
                    on_progress(whole)
                    if not stopped and ends_early(whole):
                        stopped = True
                        for each in self._links:
                            each.send(Stop())
                else:
                    raise message
        return [done[number] for number in sorted(done)]


def _received(link: Connection) -> LoadDone | WorkerProgress | Exception:
    try:
        message: LoadDone | WorkerProgress | Exception = link.recv()
    except (EOFError, OSError):
        raise InternalError("a client process ended", cure="see its messages above") from None
    return message
