"""`make chaos`: storms over clusters of real processes, and a page about them.

`make chaos` runs rounds of two minutes, each with a seed of its own, for 20 minutes, and writes bench/results/chaos.md.
`make chaos SEED=7 MINUTES=2` runs one round and writes no page. `make chaos SOAK=1` restarts processes under a light
load, and adds its rows to the page.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tests.chaos.history import line_of
from tests.chaos.run import Outcome, run
from tests.chaos.scenario import Scenario, draw
from tests.chaos.soak import slopes, soak_scenario
from tests.chaos.summary import Round, from_json, page, round_of, to_json

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
ROUND_S = 120.0
_TAIL = 60  # lines of a history that a failure shows


class Display:
    """A bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task: TaskID | None = None
        self._stage = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, seconds: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._title = title
        self._task = self._progress.add_task(title, total=seconds)

    def show(self, stage: str, seconds: float) -> None:
        assert self._task is not None
        self._progress.update(self._task, description=f"{self._title}: {stage}", completed=seconds)
        if not self._console.is_terminal and stage != self._stage:
            self.say(f"{self._title}: {stage}")
        self._stage = stage

    def say(self, line: str) -> None:
        self._console.print(f"chaos: {line}", markup=False, soft_wrap=True)


@dataclass
class Results:
    """The figures on disk: of the last storms, and of the last soak."""

    rounds: list[Round]
    soak: list[dict[str, Any]]

    @classmethod
    def read(cls) -> Self:
        path = RESULTS / "chaos.json"
        stored = json.loads(path.read_text()) if path.is_file() else {"rounds": [], "soak": []}
        return cls(from_json(stored["rounds"]), stored["soak"])

    def write(self) -> None:
        stored = {"rounds": to_json(self.rounds), "soak": self.soak}
        (RESULTS / "chaos.json").write_text(json.dumps(stored, indent=1) + "\n")
        cores, python = psutil.cpu_count(), platform.python_version()
        load = f"load average {os.getloadavg()[1]:.0f} at the end, this run's own included"
        machine = f"{cores} cores, {load}; Python {python}, {platform.system()}; {time.strftime('%Y-%m-%d')}."
        (RESULTS / "chaos.md").write_text(page(self.rounds, self.soak, machine=machine))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="run one round with this seed")
    parser.add_argument("--first", type=int, default=1, help="the first round's seed (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: %(default)s)")
    parser.add_argument("--soak", action="store_true", help="a light load, with restarts")
    parser.add_argument("--restart-every", type=float, default=60.0, help="seconds (default: %(default)s)")
    asked = parser.parse_args(arguments)
    with Display() as display:
        if asked.soak:
            return soak(asked.seed or 1, 60 * asked.minutes, asked.restart_every, display)
        return storms(list(_scenarios(asked.seed, asked.first, 60 * asked.minutes)), display, keep=asked.seed is None)


def _scenarios(seed: int | None, first: int, seconds: float) -> Iterator[Scenario]:
    if seed is not None:
        yield scenario_of(seed, seconds)
        return
    for number in range(max(1, round(seconds / ROUND_S))):
        yield scenario_of(first + number, min(seconds, ROUND_S))


def scenario_of(seed: int, seconds: float) -> Scenario:
    """Every third seed has a third node of each role."""
    size = 3 if seed % 3 == 0 else 2
    return draw(seed, seconds=seconds, prefills=size, decodes=size)


def storms(scenarios: Sequence[Scenario], display: Display, *, keep: bool) -> int:
    """Runs them one after the other; 1 if something was wrong."""
    rounds: list[Round] = []
    failed = False
    for scenario in scenarios:
        outcome = _run(scenario, f"seed {scenario.seed}", display)
        rounds.append(round_of(scenario, outcome.history.events, outcome.violations))
        failed |= bool(outcome.violations)
        if keep:
            Results(rounds, Results.read().soak).write()
    return int(failed)


def soak(seed: int, seconds: float, every_s: float, display: Display) -> int:
    outcome = _run(soak_scenario(seed, seconds=seconds, every_s=every_s), "soak", display)
    found = slopes(outcome.history.events, seconds=seconds)
    Results(Results.read().rounds, [slope.as_row() for slope in found]).write()
    for slope in found:
        display.say(
            f"{slope.process}: {slope.mib_per_restart:+.2f} MiB and {slope.files_per_restart:+.2f} files per restart"
        )
    return int(bool(outcome.violations) or not all(slope.flat for slope in found))


def _run(scenario: Scenario, title: str, display: Display) -> Outcome:
    logs = Path(tempfile.mkdtemp(prefix="baton-chaos-"))
    display.begin(title, scenario.seconds)
    outcome = asyncio.run(run(scenario, logs, progress=display.show))
    lines = [line_of(event) for event in outcome.history.events]
    (logs / "history").write_text("\n".join(lines) + "\n")
    found = round_of(scenario, outcome.history.events, outcome.violations)
    display.say(f"{title}: {found.requests} requests, {found.ends}, {found.retried} retried; history and logs: {logs}")
    if outcome.violations:
        for line in lines[-_TAIL:]:
            display.say(line)
        for violation in outcome.violations:
            display.say(f"{violation.at_s:9.3f} {violation.kind}: {violation.text}")
        display.say(f"replay: make chaos SEED={scenario.seed} MINUTES={scenario.seconds / 60:g}")
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
