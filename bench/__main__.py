"""`make bench`: every benchmark of this machine, as tables on the terminal and as pages under bench/results."""

import importlib
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.table import Row, print_rows, read_json, write_json, write_markdown

RESULTS = Path(__file__).resolve().parent / "results"
PLOT = "--plot"

# Name, title, and the module whose `run` measures it: a machine need only have what the wanted ones import.
BENCHMARKS = (
    ("transport", "Transport alone", "bench.transport"),
    ("cache_to_cache", "Cache to cache: gather, digest, UCX, scatter", "bench.cache_to_cache"),
    ("transfer_gpu", "Cache to cache between GPUs, beside a plain copy", "bench.transfer_gpu"),
    ("exposed", "Exposed transfer time of a prompt", "bench.exposed"),
    ("receiving", "Decoding beside receiving", "bench.receiving"),
    ("hand_over", "Handed over against one process", "bench.hand_over"),
    ("latency", "Latency at the client with default settings", "bench.latency"),
    ("endurance", "Thousands of requests through one pair", "bench.endurance"),
    ("loading", "Loading a model from disk", "bench.loading"),
    ("attention", "Attention kernels", "bench.attention.run"),
    ("engine", "The engine on a GPU", "bench.engine.run"),
)
# A machine with a GPU measures them there, and has pages of its own for them.
EITHER = frozenset({"exposed", "receiving", "loading", "latency"})
PLOTS = (
    ("transport", "bench.transfer_plot"),
    ("cache_to_cache", "bench.transfer_plot"),
    ("transfer_gpu", "bench.transfer_plot"),
    ("attention", "bench.attention.plot"),
    ("engine", "bench.engine.plot"),
)


def main(arguments: Sequence[str]) -> None:
    """Args:
    arguments: names of benchmarks, none for all. With `--plot` nothing is measured: what was, is drawn.
    """
    wanted = [argument for argument in arguments if argument != PLOT]
    if PLOT in arguments:
        for name, module in PLOTS:
            figures = RESULTS / f"{name}.json"
            if figures.exists() and (not wanted or name in wanted):
                importlib.import_module(module).draw(read_json(figures), RESULTS / f"{name}.svg")
        return
    for name, title, module in BENCHMARKS:
        if wanted and name not in wanted:
            continue
        rows: list[Row] = []
        try:
            rows.extend(importlib.import_module(module).run(_say))
        finally:  # one that breaks, or is stopped, keeps what it has measured
            if rows:
                print_rows(title, rows)
                page = f"{name}_gpu" if name in EITHER and torch.cuda.is_available() else name
                write_markdown(f"{title} ({_machine()})", rows, RESULTS / f"{page}.md")
                write_json(rows, RESULTS / f"{page}.json")


def _machine() -> str:
    """What the figures were measured on, and when."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = Path("/proc/cpuinfo").read_text().count("processor\t:")
    return f"{model}, {cores} cores, {time.strftime('%Y-%m-%d')}"


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
