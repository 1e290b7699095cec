"""The gateway's choice of prefill nodes, driven by Mooncake's conversation trace, in virtual time.

Hits are counted in the trace's second half, in its blocks of 512 tokens. The nodes compute prompts as one H200 with
Llama-3.1-8B does (39,000 tokens a second in steps of 4096), or with a model eight times as slow.
"""

import json
import lzma
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.costs import StepCosts
from baton.types import NO_SLO, Slo
from bench.curves import Panel, draw_panels
from bench.routing_nodes import Arrival, Choose, Served, by_router, in_turn, least_loaded, simulate
from bench.table import Row

BLOCK_SIZE = 512

_POINTS = ((64, 0.0055), (256, 0.0085), (1024, 0.027), (4096, 0.105))
LLAMA_8B = StepCosts(_POINTS, pair_s=1.3e-9)
LLAMA_70B = StepCosts(tuple((tokens, 8 * seconds) for tokens, seconds in _POINTS), pair_s=6.5e-9)

# Share of blocks that are cached on arrival: goals of 4 nodes by the size of their caches.
_GOALS = {1: 0.17, 8: 0.38}
_RATES = {
    "8B": (LLAMA_8B, (0.5, 1.0, 2.0), Slo(ttft_s=6.0)),
    "70B": (LLAMA_70B, (0.125, 0.25), Slo(ttft_s=40.0)),
}
_WORK = re.compile(r"(?P<model>\S+) at (?P<rate>\S+) x the trace's rate, 4 nodes of (?P<millions>\d+)M tokens")


def run(progress: Callable[[str], None], trace: Path) -> list[Row]:
    """Rows for each model, rate and size of caches.

    Raises:
        FileNotFoundError: there is no trace; it is conversation_trace.jsonl of kvcache-ai/Mooncake's FAST25-release.
    """
    arrivals = read(trace)
    rows: list[Row] = []
    for model, (costs, rates, slo) in _RATES.items():
        for rate in rates:
            for millions in _GOALS:
                progress(f"routing: {model} at {rate:g} x, {millions}M tokens")
                rows += _compare(model, costs, rate, millions, slo, arrivals)
    rows += _many_nodes(arrivals)
    return rows


def read(trace: Path) -> list[Arrival]:
    """A trace of Mooncake's, JSON lines compressed with xz."""
    with lzma.open(trace, "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [Arrival(each["timestamp"] / 1000, each["input_length"], tuple(each["hash_ids"])) for each in records]


def faster(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in less time."""
    return [Arrival(each.at_s / rate, each.num_tokens, each.blocks) for each in arrivals]


def _compare(
    model: str, costs: StepCosts, rate: float, millions: int, slo: Slo, arrivals: Sequence[Arrival]
) -> list[Row]:
    def served(choose: Choose, its_slo: Slo = NO_SLO) -> Served:
        return simulate(
            faster(arrivals, rate),
            choose,
            costs,
            nodes=4,
            cache_tokens=millions * 1_000_000,
            block_size=BLOCK_SIZE,
            slo=its_slo,
        )

    work = f"{model} at {rate:g} x the trace's rate, 4 nodes of {millions}M tokens"
    ways = {
        "Baton": served(by_router),
        f"Baton, TTFT SLO {slo.ttft_s:g} s": served(by_router, slo),
    }
    rivals = {"round robin": served(in_turn()), "least loaded": served(least_loaded)}
    rows = []
    for name, ours in ways.items():
        hits = 100 * ours.hit_rate(), 100 * rivals["round robin"].hit_rate()
        rows.append(Row(f"block hits, {name}", work, hits[0], "%", "round robin", hits[1]))
        for rival, theirs in rivals.items():
            times_s = ours.ttft_percentile(0.99), theirs.ttft_percentile(0.99)
            goal = 1.0 if name == "Baton" else None  # with an SLO, the time that it leaves is used
            rows.append(Row(f"TTFT p99, {name}", work, times_s[0], "s", rival, times_s[1], goal, less_is_better=True))
    means_s = ways["Baton"].mean_s(), rivals["least loaded"].mean_s()
    rows.append(Row("TTFT mean, Baton", work, means_s[0], "s", "least loaded", means_s[1], 1.0, less_is_better=True))
    return rows


def _many_nodes(arrivals: Sequence[Arrival]) -> list[Row]:
    begin_s = time.perf_counter()
    simulate(faster(arrivals, 25.0), by_router, LLAMA_8B, nodes=100, cache_tokens=1_000_000, block_size=BLOCK_SIZE)
    seconds = time.perf_counter() - begin_s
    return [Row("simulation", f"{len(arrivals)} requests, 100 nodes", seconds, "s", limit=60.0)]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes an SVG: TTFT p99 over the rate, one panel for each model and size of caches."""
    curves: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        point = _WORK.fullmatch(row.work)
        if point is None or row.rival_measured is None or not row.name.startswith("TTFT p99, "):
            continue
        panel = f"Llama-3.1-{point['model']}, 4 nodes with caches of {point['millions']}M tokens"
        curves[panel][row.name.removeprefix("TTFT p99, ")][float(point["rate"])] = row.measured
        curves[panel][row.rival][float(point["rate"])] = row.rival_measured
    panels = [Panel(title, "Baton", named, {}) for title, named in curves.items()]
    draw_panels(panels, path, x_label="rate, in multiples of the trace's", y_label="TTFT p99, s")
