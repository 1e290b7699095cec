"""`make bench`: every benchmark of this machine, as tables on the terminal and as pages under bench/results."""

import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import cache_to_cache, hand_over, transport
from bench.table import Row, print_rows, write_markdown

RESULTS = Path(__file__).resolve().parent / "results"

BENCHMARKS: tuple[tuple[str, str, Callable[[Callable[[str], None]], Sequence[Row]]], ...] = (
    ("transport", "Transport alone", transport.run),
    ("cache_to_cache", "Cache to cache: gather, digest, UCX, scatter", cache_to_cache.run),
    ("hand_over", "Handed over against one process", hand_over.run),
)


def main(wanted: Sequence[str]) -> None:
    for name, title, run in BENCHMARKS:
        if wanted and name not in wanted:
            continue
        rows = run(_say)
        print_rows(title, rows)
        write_markdown(f"{title} ({_machine()})", rows, RESULTS / f"{name}.md")


def _machine() -> str:
    """What the figures were measured on, and when."""
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
