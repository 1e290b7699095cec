"""Elastic nodes against the same nodes colocated and against fixed roles, in `baton plan`'s simulation.

`python -m bench.placement` prints the points of bench/results/placement.md. The rates are near what colocated nodes
serve.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from baton.core.types import LocalPolicy
from baton.load.goals import Goal
from baton.load.lengths import Lognormal, Uniform
from baton.load.workload import LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.measured import LLAMA_8B_H200
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome

NODE = NodeSpec(LLAMA_8B_H200, step_tokens=2048)
_CHAT = "chat", Synthetic(Lognormal(250, 0.8), Lognormal(200, 0.8))
_LONG = "long", Synthetic(Uniform(4096, 8192), Uniform(128, 256))
# Requests per second of one node.
POINTS: tuple[tuple[tuple[str, Synthetic], Goal, float], ...] = (
    (_CHAT, Goal(0.4, tpot_s=0.010), 64.0),
    (_CHAT, Goal(0.4, gap_s=0.010), 62.5),
    (_CHAT, Goal(0.4, gap_s=0.015), 70.0),
    (_CHAT, Goal(0.4, tpot_s=0.020), 80.0),
    (_CHAT, Goal(0.4, gap_s=0.030), 82.5),
    (_CHAT, Goal(0.4, tpot_s=0.050), 95.0),
    (_LONG, Goal(2.0, tpot_s=0.007), 3.0),
    (_LONG, Goal(2.0, tpot_s=0.010), 4.2),
    (_LONG, Goal(2.0, gap_s=0.020), 5.0),
    (_LONG, Goal(2.0, tpot_s=0.050), 5.25),
)
SHAPES = ((1, 1), (2, 2), (1, 3), (3, 1))
_SECONDS = 10.0
_REQUESTS = 200


def outcomes(load: Synthetic, goal: Goal, rate: float, prefills: int, decodes: int) -> Iterator[SimulatedOutcome]:
    """Colocated, strict, elastic without prefill nodes that decode, and elastic."""
    requests = max(_REQUESTS, int(_SECONDS * rate))
    planned = load.plan(rate, LengthSpan(requests=requests, warmup_s=max(4.0, 0.1 * requests / rate)), 1)
    elastic = ClusterSpec(prefills, decodes, NODE, NODE)
    for spec in (
        replace(elastic, prefills=0, decodes=prefills + decodes, policy=LocalPolicy.LOCAL),
        replace(elastic, policy=LocalPolicy.STRICT),
        replace(elastic, also_decodes=False),
        elastic,
    ):
        yield simulate(spec, goal, planned)


def table(write: Callable[[str], object]) -> None:
    """Writes Markdown rows: the share of requests within the SLO, in percent."""
    write("| load | SLO | nodes | req/s | colocated | strict | elastic, prefill nodes only prefill | elastic |")
    write("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (name, load), goal, rate in POINTS:
        for prefills, decodes in SHAPES:
            whole = rate * (prefills + decodes)
            shares = [f"{100 * each.share():.0f}" for each in outcomes(load, goal, whole, prefills, decodes)]
            slo = str(goal).removesuffix(" for 90 %")
            write(f"| {name} | {slo} | {prefills}P{decodes}D | {whole:g} | {' | '.join(shares)} |")


if __name__ == "__main__":
    table(lambda line: print(line, flush=True))
