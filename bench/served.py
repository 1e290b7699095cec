"""The simulation of `baton plan` beside what was served. `python -m bench.served` prints a Markdown table.

The served rows are those of bench/results/served.md and bench/results/chat_rates.md. `EARLIER` ones were served before
requests without an SLO had an `Objective`, so the simulation bounds their steps as nodes did then. Rows of that time
whose nodes the gateway chose without an SLO are left out, because it chooses otherwise now. `HOLDS` rows were served
when gateways held first tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from baton.core.types import LocalPolicy, Objective
from baton.load.goals import Goal
from baton.load.workload import PRESETS, LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.measured import LLAMA_8B_H200, SERVED_HOST
from baton.planner.node_spec import NodeSpec
from baton.planner.outcome import SimulatedOutcome

# Nodes then made steps of up to 25 ms next to streams, and twice that for a prompt that had waited for 0.5 s. So many
# plain steps, and times of a prompt alone, are that.
THEN = {"chat": Objective(gap_factor=4.2, ttft_factor=70.0), "long": Objective(gap_factor=5.0, ttft_factor=3.3)}
NODE = NodeSpec(LLAMA_8B_H200, step_tokens=1024)
PAIR = ClusterSpec(1, 1, NODE, NODE, host=SERVED_HOST, smooth_starts=False)
HOLDS = replace(PAIR, smooth_starts=True)
STRICT = replace(PAIR, policy=LocalPolicy.STRICT)
STRICT_HOLDS = replace(STRICT, smooth_starts=True)
ONE = replace(PAIR, prefills=0, policy=LocalPolicy.LOCAL)
TWO = replace(ONE, decodes=2)
FOUR = replace(STRICT, host=replace(SERVED_HOST, gateways=4))
NO_SLO, SLO = Goal(), Goal(0.4, tpot_s=0.015)
_SERVED, _RATES = LengthSpan(16.0, warmup_s=5.0), LengthSpan(10.0, warmup_s=3.0)
_LATER = LengthSpan(12.0, warmup_s=3.0)


@dataclass(frozen=True)
class Row:
    """A run that was served.

    Args:
        served: TTFT p50 and p99, TPOT p50 and p99, p99 of all gaps, and p50 of the requests' p99 gaps, in ms.
    """

    name: str
    spec: ClusterSpec
    load: str
    rate: float
    goal: Goal
    span: LengthSpan
    served: tuple[float, float, float, float, float, float]


EARLIER = (
    Row("one node", ONE, "chat", 40, NO_SLO, _SERVED, (27.9, 62.9, 7.6, 8.8, 19.3, 19.0)),
    Row("one node", ONE, "long", 2.5, NO_SLO, _SERVED, (254.4, 671.2, 9.3, 20.0, 27.9, 25.3)),
    Row("1P1D, strict, recorded", STRICT, "chat", 40, NO_SLO, _SERVED, (22.2, 46.8, 5.9, 6.2, 9.1, 8.8)),
    Row("1P1D, strict, 4 gateways, recorded", FOUR, "chat", 70, NO_SLO, _SERVED, (39.2, 91.4, 11.1, 14.8, 30, 28)),
    Row("1P1D, strict, recorded", STRICT, "long", 4.5, NO_SLO, _SERVED, (480.8, 1524.0, 6.0, 6.2, 9.7, 9.1)),
    Row("1P1D, SLO", PAIR, "chat", 30, SLO, _RATES, (16.05, 34.59, 5.05, 5.33, 6.47, 6.44)),
    Row("1P1D, SLO", PAIR, "chat", 60, SLO, _RATES, (19.37, 56.38, 6.65, 7.04, 9.21, 8.90)),
    Row("1P1D, SLO", PAIR, "chat", 85, SLO, _RATES, (28.56, 78.15, 9.40, 10.50, 16.45, 15.35)),
    Row("two colocated, SLO", TWO, "chat", 30, SLO, _RATES, (17.55, 35.71, 4.90, 5.15, 11.35, 10.70)),
    Row("two colocated, SLO", TWO, "chat", 60, SLO, _RATES, (22.72, 63.35, 6.44, 7.17, 15.99, 15.31)),
)  # fmt: skip
# All of 2026-11-30, with the default objective.
NOW = (
    Row("1P1D, default", HOLDS, "chat", 40, NO_SLO, _LATER, (28.1, 64.7, 5.4, 6.0, 9.1, 8.7)),
    Row("1P1D, strict", STRICT_HOLDS, "chat", 40, NO_SLO, _LATER, (33.5, 55.8, 5.7, 6.1, 8.9, 8.7)),
    Row("two colocated", TWO, "chat", 40, NO_SLO, _LATER, (24.8, 59.8, 5.3, 5.7, 9.0, 8.2)),
    Row("1P1D, default", HOLDS, "chat", 70, NO_SLO, _LATER, (36.3, 86.7, 7.0, 8.0, 12.8, 12.3)),
    Row("two colocated", TWO, "chat", 70, NO_SLO, _LATER, (31.2, 89.5, 6.9, 7.7, 11.4, 11.2)),
    Row("1P1D, default", HOLDS, "long", 4.5, NO_SLO, _LATER, (350.3, 689.6, 6.7, 10.7, 15.0, 10.5)),
    Row("1P1D, default, not held", PAIR, "long", 4.5, NO_SLO, _LATER, (323.6, 666.8, 6.8, 10.6, 16.0, 12.3)),
    Row("1P1D, strict, not held", STRICT, "long", 4.5, NO_SLO, _LATER, (480.8, 2537.1, 5.9, 6.2, 10.7, 10.2)),
    Row("two colocated", TWO, "long", 4.5, NO_SLO, _LATER, (568.3, 1176.2, 8.0, 13.2, 19.3, 13.0)),
    Row("1P1D, default, not held", PAIR, "long", 5.5, NO_SLO, _LATER, (355.8, 853.0, 7.5, 13.0, 21.5, 13.8)),
    Row("two colocated", TWO, "long", 5.5, NO_SLO, _LATER, (635.8, 1332.8, 9.6, 16.1, 21.6, 16.1)),
)  # fmt: skip
_SEED = 0


def simulated(row: Row) -> tuple[float, ...]:
    """What `Row.served` has, by the simulation."""
    planned = Synthetic(*PRESETS[row.load]).plan(row.rate, row.span, _SEED)
    spec = replace(row.spec, objective=THEN[row.load]) if row in EARLIER else row.spec
    return figures(simulate(spec, row.goal, planned))


def figures(outcome: SimulatedOutcome) -> tuple[float, ...]:
    jobs = [job for job in outcome.counted if job.output > 1]
    ttfts_s = [job.ttft_s for job in outcome.counted]
    tpots_s = [job.tpot_s for job in jobs]
    gaps_s = [job.gap_quantile_s(0.99) for job in jobs]
    every = _weighted_quantile(list(chain.from_iterable(job.gaps() for job in jobs)), 0.99)
    wanted = ((ttfts_s, 0.5), (ttfts_s, 0.99), (tpots_s, 0.5), (tpots_s, 0.99))
    quantiles = [float(np.quantile(values, share)) for values, share in wanted]
    return tuple(1e3 * each for each in (*quantiles, every, float(np.quantile(gaps_s, 0.5))))


def _weighted_quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    ordered = np.array(sorted(values))
    weights = np.cumsum(ordered[:, 1])
    return float(ordered[min(len(ordered) - 1, int(np.searchsorted(weights, share * weights[-1]))), 0])


def table(write: Callable[[str], object]) -> None:
    """Writes Markdown rows: simulated / served, and by how many percent the simulation is off."""
    write("| nodes | load | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | gap p99 | p99 gap of a request p50 |")
    write("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in (*NOW, *EARLIER):
        cells = [
            f"{found:.3g} / {served:.3g} ({100 * (found / served - 1):+.0f} %)"
            for found, served in zip(simulated(row), row.served, strict=True)
        ]
        write(f"| {row.name} | {row.load} {row.rate:g}/s | {' | '.join(cells)} |")


if __name__ == "__main__":
    table(lambda line: print(line, flush=True))
