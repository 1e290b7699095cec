"""The gateway's choice of prefill nodes, driven by Mooncake's conversation trace, in `baton plan`'s simulation.

Hits are counted in the trace's second half, in its blocks of 512 tokens. The nodes compute prompts as one H200 with
Llama-3.1-8B does (39,000 tokens a second in steps of 4096), or with a model eight times as slow.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from baton.core.costs import StepCosts
from baton.core.types import LocalPolicy
from baton.gateway.fleet.placement import place
from baton.load.goals import Goal
from baton.load.traces import read_trace
from baton.load.workload import LengthSpan, PlannedRequest, TraceReplay
from baton.planner.baselines import round_robin, shortest_queue
from baton.planner.cluster import Choose, ClusterSpec, simulate
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome
from bench.curves import Panel, draw_panels
from bench.table import Row

_POINTS = ((64, 0.0055), (256, 0.0085), (1024, 0.027), (4096, 0.105))
LLAMA_8B = StepCosts(_POINTS, pair_s=1.3e-9)
LLAMA_70B = StepCosts(tuple((tokens, 8 * seconds) for tokens, seconds in _POINTS), pair_s=6.5e-9)

# Share of blocks that are cached on arrival: goals of 4 nodes by the size of their caches.
_GOALS = {1: 0.17, 8: 0.38}
_RATES = {
    "8B": (LLAMA_8B, (0.5, 1.0, 2.0), 6.0),
    "70B": (LLAMA_70B, (0.125, 0.25), 40.0),
}
_WORK = re.compile(r"(?P<model>\S+) at (?P<rate>\S+) x the trace's rate, 4 nodes of (?P<millions>\d+)M tokens")


def run(progress: Callable[[str], None], trace: Path) -> list[Row]:
    """Rows for each model, rate and size of caches.

    Raises:
        FileNotFoundError: there is no trace; it is conversation_trace.jsonl of kvcache-ai/Mooncake's FAST25-release.
    """
    requests = TraceReplay(read_trace(trace)).plan(1.0, LengthSpan(requests=1 << 30), 0)
    rows: list[Row] = []
    for model, (costs, rates, ttft_s) in _RATES.items():
        for rate in rates:
            for millions in _GOALS:
                progress(f"routing: {model} at {rate:g} x, {millions}M tokens")
                rows += _compare(model, costs, rate, millions, ttft_s, requests)
    rows += _many_nodes(requests)
    return rows


def faster(requests: Sequence[PlannedRequest], rate: float) -> list[PlannedRequest]:
    """The same requests in less time."""
    return [replace(each, at_s=each.at_s / rate) for each in requests]


def prefilled(
    requests: Sequence[PlannedRequest],
    costs: StepCosts,
    *,
    nodes: int,
    cache_tokens: int,
    ttft_s: float | None = None,
    choose: Choose = place,
) -> SimulatedOutcome:
    """What becomes of the requests' prompts on so many prefill nodes; nothing is decoded."""
    prefill = NodeSpec(costs, step_tokens=4096, kv_tokens=cache_tokens)
    decode = replace(prefill, kv_tokens=1 << 50)
    spec = ClusterSpec(nodes, 1, prefill, decode, LocalPolicy.STRICT, also_decodes=False)
    prompts = [replace(each, output_tokens=1) for each in requests]
    return simulate(spec, Goal(ttft_s=ttft_s), prompts, choose=choose)


def _compare(
    model: str, costs: StepCosts, rate: float, millions: int, ttft_s: float, requests: Sequence[PlannedRequest]
) -> list[Row]:
    def served(choose: Choose = place, slo_s: float | None = None) -> SimulatedOutcome:
        cache_tokens = millions * 1_000_000
        return prefilled(faster(requests, rate), costs, nodes=4, cache_tokens=cache_tokens, ttft_s=slo_s, choose=choose)

    def hits(outcome: SimulatedOutcome) -> float:
        return 100 * outcome.hit_share(outcome.jobs[len(outcome.jobs) // 2 :])

    work = f"{model} at {rate:g} x the trace's rate, 4 nodes of {millions}M tokens"
    ways = {"Baton": served(), f"Baton, TTFT SLO {ttft_s:g} s": served(slo_s=ttft_s)}
    rivals = {"round robin": served(round_robin()), "least loaded": served(shortest_queue)}
    rows = []
    for name, ours in ways.items():
        rows.append(Row(f"block hits, {name}", work, hits(ours), "%", "round robin", hits(rivals["round robin"])))
        for rival, theirs in rivals.items():
            times_s = ours.ttft_s(0.99), theirs.ttft_s(0.99)
            goal = 1.0 if name == "Baton" else None  # with an SLO, the time that it leaves is used
            rows.append(Row(f"TTFT p99, {name}", work, times_s[0], "s", rival, times_s[1], goal, less_is_better=True))
    means_s = ways["Baton"].mean_ttft_s, rivals["least loaded"].mean_ttft_s
    rows.append(Row("TTFT mean, Baton", work, means_s[0], "s", "least loaded", means_s[1], 1.0, less_is_better=True))
    return rows


def _many_nodes(requests: Sequence[PlannedRequest]) -> list[Row]:
    begin_s = time.perf_counter()
    prefilled(faster(requests, 25.0), LLAMA_8B, nodes=100, cache_tokens=1_000_000)
    seconds = time.perf_counter() - begin_s
    return [Row("simulation", f"{len(requests)} requests, 100 nodes", seconds, "s", limit=60.0)]


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
