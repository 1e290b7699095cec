"""`--attention-table FILE`: writes what ran as a table, one row per backend, one column per test, passed of all."""

import platform
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--attention-table")
    if not path:
        return
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            backend, what = _cell(report.nodeid)
            counts[backend, what][0] += outcome == "passed"
            counts[backend, what][1] += 1
    Path(path).write_text(_markdown(counts))


def _cell(nodeid: str) -> tuple[str, str]:
    """(backend, what is shown): of `test_x[BACKEND-setting-...]` the setting, of any other test its name."""
    name, _, parameters = nodeid.rpartition("::")[2].partition("[")
    values = parameters.rstrip("]").split("-")
    backend = next((value for value in values if (value.isupper() and "_" in value) or value == "FLASHINFER"), "")
    if name in ("test_attention_is_what_its_definition_says", "test_a_captured_decode_replays_with_other_lengths"):
        backend, setting = values[0], values[1]
        captured = "captured" in name
        return backend, f"{setting.replace('_', ' ')}{', captured' if captured else ''}"
    return backend, name.removeprefix("test_").replace("_", " ")


def _markdown(counts: dict[tuple[str, str], list[int]]) -> str:
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
