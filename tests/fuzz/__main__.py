"""`python -m tests.fuzz`: feeds many random inputs to every parser, or replays a saved one.

Each target runs in processes of its own, so that one that dies or hangs in native code is a finding like any other:
its input is in a file that the process shares with this one.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz import report
from tests.fuzz.all import NAMES, one_target
from tests.fuzz.state import Shared
from tests.fuzz.target import CORPUS, FuzzFailure, Tally, read_case, run_case, save_case

_HANGS_S = 90.0  # of CPU time or of waiting, for one input; its own limits are lower
_FAILURES_MAX = 20  # of one target


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="inputs of each target (default: %(default)s)")
    parser.add_argument("--first", type=int, default=None, help="the first seed; default: after those of the report")
    parser.add_argument("--target", default="", help="only the targets with these names, comma-separated")
    parser.add_argument("--seconds", type=float, default=1e9, help="most time for one target (default: no limit)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    parser.add_argument("--report", action="store_true", help="add the run to bench/results/fuzz.md")
    parser.add_argument("--replay", type=Path, help="run one saved input only")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        return _replay(arguments.replay)
    wanted = [name for name in arguments.target.split(",") if name] or NAMES
    failed = False
    for name in wanted:
        known = report.known(name)
        first = arguments.first if arguments.first is not None else known.inputs
        count = arguments.count - known.inputs if arguments.report else arguments.count
        if count <= 0:
            continue
        run = _fuzz(name, first, count, arguments.seconds, arguments.processes)
        failed |= bool(run.findings)
        print(f"{name}: {run}", flush=True)
        if arguments.report:
            report.add(name, run)
    return 1 if failed else 0


def _replay(path: Path) -> int:
    name, case = read_case(path)
    tally = Tally()
    with one_target(name) as target:
        try:
            run_case(target, case, tally)
        except FuzzFailure as failure:
            print(f"{name}: FAILED {failure}")
            raise
    print(f"{name}: {tally}")
    return 0


def _fuzz(name: str, first: int, count: int, most_s: float, processes: int) -> "report.Run":
    """Worker k of n takes every n-th seed."""
    began_s = time.monotonic()
    run = report.Run()
    processes = max(1, min(processes, count // 100))
    with TemporaryDirectory() as folder:
        seeds = {number: first + number for number in range(processes)}
        while seeds:
            workers = [
                _Worker(
                    Path(folder), name, number, begin, processes, first + count, began_s + most_s - time.monotonic()
                )
                for number, begin in seeds.items()
            ]
            seeds = {}
            for worker in workers:
                stopped_at = worker.wait(run)
                if stopped_at is not None and len(run.findings) < _FAILURES_MAX:
                    seeds[worker.number] = stopped_at + processes
    run.seconds = time.monotonic() - began_s
    return run


class _Worker:
    """A process that runs some of a target's seeds."""

    def __init__(self, folder: Path, name: str, number: int, first: int, step: int, stop: int, most_s: float) -> None:
        self.number = number
        self._name = name
        self._shared = Shared.create(folder / f"{name}-{number}-{first}")
        self._out = folder / f"{name}-{number}.json"
        seeds = (str(each) for each in (first, stop, step))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", name, *seeds, f"{most_s:.1f}", self._shared.path, self._out],
            stderr=subprocess.DEVNULL,  # panics of native libraries write there
        )

    def wait(self, run: "report.Run") -> int | None:
        """Adds what it found to the run. Returns the seed at which it died; None: it has come to its end."""
        seen, since_s = -1, time.monotonic()
        while self._process.poll() is None:
            time.sleep(0.05)
            if self._shared.seed != seen:
                seen, since_s = self._shared.seed, time.monotonic()
            elif seen >= 0 and time.monotonic() - since_s > _HANGS_S:
                self._process.kill()
                self._process.wait()
        if self._process.returncode == 0:
            run.add_worker(self._out)
            return None
        died = "hangs" if self._process.returncode == -9 else f"ended the process with {self._process.returncode}"
        seed, case = self._shared.seed, self._shared.case
        path = save_case(CORPUS, self._name, case)
        print(f"FAILED {self._name}, seed {seed}: {died}; saved as {path}", flush=True)
        run.findings.append(died)
        return seed


if __name__ == "__main__":
    sys.exit(main())
