"""Writes the results of the conformance suite of attention backends as a table: `--attention-table FILE`.

One row per setting or test, one column per backend, passed of all. Empty cells are features that a backend does not
declare.
"""

import platform
import time
from pathlib import Path

import pytest
import torch

from attention.selection import BACKENDS

# Other tests of the same session are ignored.
_TESTS = ("tests/conformance/attention/", "tests/gpu/test_attention_graphs.py")
_NAMES = {backend.capabilities.name for backend in BACKENDS}


class AttentionTable:
    """A pytest plugin that counts as results come in and writes at the end, also of a run that was cut short."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.nodeid.startswith(_TESTS) or (report.when != "call" and report.passed):
            return
        cell = _cell(report.nodeid)
        passed, count = self._counts.get(cell, (0, 0))
        self._counts[cell] = passed + report.passed, count + 1

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(_markdown(self._counts))


def _cell(nodeid: str) -> tuple[str, str]:
    """(backend, what is shown): of `test_x[BACKEND-setting-...]` the setting, of any other test its name."""
    name, _, parameters = nodeid.rpartition("::")[2].partition("[")
    values = parameters.rstrip("]").split("-")
    backend = next((value for value in values if value in _NAMES), "")
    if name in ("test_attention_equals_its_definition", "test_a_captured_decode_replays_with_other_lengths"):
        backend, setting = values[0], values[1]
        captured = "captured" in name
        return backend, f"{setting.replace('_', ' ')}{', captured' if captured else ''}"
    return backend, name.removeprefix("test_").replace("_", " ")


def _markdown(counts: dict[tuple[str, str], tuple[int, int]]) -> str:
    backends = sorted({backend for backend, _ in counts})
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU, interpreted"
    lines = [
        f"# Attention conformance ({device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')})",
        "",
        "Passed of all cases, each against float64. A cell is empty where a backend does not declare the feature.",
        "",
        f"| | {' | '.join(backends)} |",
        f"|---{'|---' * len(backends)}|",
    ]
    for what in sorted({what for _, what in counts}):
        cells = [counts.get((backend, what)) for backend in backends]
        lines.append(f"| {what} | {' | '.join('' if cell is None else f'{cell[0]}/{cell[1]}' for cell in cells)} |")
    return "\n".join(lines) + "\n"
