"""One run of `baton bench`: a given rate, or a search for one, against given servers or a cluster of its own."""

import asyncio
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton.cli.local_cluster import ClusterOptions, local_cluster
from baton.cli.signals import Stopped, note_signals, stop_on_signals
from baton.core.log_lines import escaped
from baton.core.logs import write_line
from baton.load.goals import Goal
from baton.load.measure import Measurement
from baton.load.probe import probe
from baton.load.results import Found, LoadResults
from baton.load.runner import Clients, OnProgress, RunOptions
from baton.load.shape import Shape
from baton.load.target import Api, Server, Target
from baton.load.worker import WorkerProgress as Counts
from baton.load.workload import LengthSpan, TraceReplay

ENDED_EARLY = 130  # exit code after SIGINT or SIGTERM


class LoadProgress:
    """What a user sees while a command measures, in a `with` block: a bar for the current run on a terminal, a line for
    each run elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]} running, {task.fields[failed]} failed"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._console.print(f"baton: {escaped(line)}", markup=False, soft_wrap=True)

    def run(self, title: str, total: int) -> OnProgress:
        """Starts the bar of the next run, in place of the last one's."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        if not self._console.is_terminal:
            self.say(f"{title}: {total} requests")
        task = self._task = self._progress.add_task(title, total=total, running=0, failed=0)

        def show(counts: Counts) -> None:
            self._progress.update(
                task, completed=counts.ended, running=counts.sent - counts.ended, failed=counts.failed
            )

        return show


@dataclass(frozen=True)
class Search:
    precision: float
    runs_max: int


@dataclass(frozen=True)
class What:
    """What to measure: a search's rates, or the given rate if `search` is None."""

    goals: Sequence[Goal]
    search: Search | None
    rounds: int
    seed: int


def measured_results(
    given: Sequence[Target], shape: Shape, span: LengthSpan, options: RunOptions, what: What, processes: int
) -> LoadResults:
    command = f"baton bench {shlex.join(_without_key(sys.argv[1:]))}"
    try:
        with stop_on_signals(), _some_target(given) as targets, LoadProgress() as shown:
            servers = [asyncio.run(probe(target)) for target in targets]
            workload, rate = shape.build(servers)
            if isinstance(workload, TraceReplay) and workload.left_out:
                shown.say(f"{workload.left_out} of the trace's {len(workload.trace)} requests do not fit: left out")
            with Clients(processes) as clients, note_signals() as stop:
                measurement = Measurement(clients, workload, span, options, shown.run, what.seed, stop)
                results = _measured(measurement, servers, rate, what)
                return replace(results, command=command, stopped=stop())
    except Stopped:
        raise _ended_early() from None


def _measured(measurement: Measurement, servers: Sequence[Server], rate: float, what: What) -> LoadResults:
    """Makes the runs. After a signal, the results have the requests that ended before it.

    Raises:
        Exit: a signal came before any counted request ended.
    """
    found: Sequence[Found] = ()
    if what.search is None:
        runs = measurement.rounds(servers, rate, what.rounds)
    else:
        runs, found = measurement.search(
            servers, what.goals, start=rate, precision=what.search.precision, runs_max=what.search.runs_max
        )
    if not measurement.stop():
        return LoadResults(runs, what.goals, found)
    runs = [run for run in runs if run.kept is not None or run.counted]
    if not runs:
        raise _ended_early()
    return LoadResults(runs, what.goals, found if any(each.rate for each in found) else ())


def _ended_early() -> typer.Exit:
    write_line("baton: stopped before a request of the measurement had ended")
    return typer.Exit(ENDED_EARLY)


@contextmanager
def _some_target(given: Sequence[Target]) -> Iterator[Sequence[Target]]:
    """The given targets, or a local cluster for as long as the context lasts."""
    if given:
        yield given
        return
    with local_cluster(ClusterOptions(log_level="warning")) as cluster:
        yield [Target(cluster.gateway.address, "demo", Api.GRPC)]


def _without_key(arguments: Sequence[str]) -> list[str]:
    """The command line without its API key, because results are shown to others."""
    hidden, kept = False, []
    for argument in arguments:
        if argument.startswith("--api-key="):
            argument = "--api-key=..."
        kept.append("..." if hidden else argument)
        hidden = argument == "--api-key"
    return kept
