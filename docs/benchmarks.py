"""Writes docs/benchmarks.md, the list of all pages of results; `make docs` calls it."""

from pathlib import Path

PAGE = Path(__file__).resolve().parent / "benchmarks.md"
RESULTS = PAGE.parents[1] / "bench" / "results"

_INTRODUCTION = """# Benchmarks

Each page has the figures of one benchmark, next to rivals of the same run, with the machine and the date. `make bench`
runs those that fit the machine; `python -m bench NAME` runs one. [Benchmarking](benchmarking.md) describes
`baton bench`, which measures a deployment of your own. `make docs` writes this page.

To begin with: latency and throughput [at the client](../bench/results/served.md), also next to vLLM; [steps of the
engine](../bench/results/engine.md); KV [from one GPU to another](../bench/results/transfer_gpu.md); and what elastic
roles gain, [simulated](../bench/results/placement.md).

| page | what was measured |
|---|---|
"""


def page() -> str:
    """The page's text."""
    rows = [
        f"| [{path.stem}](../bench/results/{path.name}) | {_title(path)} |\n" for path in sorted(RESULTS.glob("*.md"))
    ]
    return _INTRODUCTION + "".join(rows)


def _title(path: Path) -> str:
    return next(line for line in path.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")


if __name__ == "__main__":
    PAGE.write_text(page())
