"""A pytest plugin that measures the CPU seconds of each test file: `pytest -p tests.cpu_seconds`, also with `-n`.

It writes `cpu_seconds.json` beside this file, from which `tests.selection` takes the cheap files. It counts the test
process, its children that ended, and those that its fork server started. Unlike wall time, this hardly depends on what
else the machine does.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

FILE = Path(__file__).with_suffix(".json")
_NAME = "cpu_s"


def read() -> dict[str, float]:
    """CPU seconds by test file, as measured last. Files that are newer than the measurement are missing."""
    measured: dict[str, float] = json.loads(FILE.read_text())
    return measured


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu_s()
    result = yield
    spent = _cpu_s() - before
    item.config.stash.setdefault(_SPENT, defaultdict(float))[item.nodeid.partition("::")[0]] += spent
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    spent = session.config.stash.get(_SPENT, defaultdict(float))
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # of one of xdist's workers
        output[_NAME] = dict(spent)
    elif spent:
        _write(spent)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Adds what one of xdist's workers measured."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    spent = config.stash.setdefault(_SPENT, defaultdict(float))
    for file, seconds in getattr(node, "workeroutput", {}).get(_NAME, {}).items():
        spent[file] += seconds


_SPENT = pytest.StashKey[defaultdict[str, float]]()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _fork_server_cpu_s()


def _fork_server_cpu_s() -> float:
    """Of the fork server of `tests.warm` and of its processes that ended: they are not children of this process."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return 0.0
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


def _write(spent: dict[str, float]) -> None:
    before = read() if FILE.is_file() else {}
    merged = {**before, **{file: round(seconds, 2) for file, seconds in spent.items()}}
    kept = {file: seconds for file, seconds in sorted(merged.items()) if Path(file).is_file()}
    FILE.write_text(json.dumps(kept, indent=0) + "\n")
