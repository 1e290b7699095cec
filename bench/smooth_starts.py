"""First tokens of hand-overs that wait for the second one, against ones that are passed on at once. Simulated.

`python -m bench.smooth_starts` prints the tables of bench/results/smooth_starts.md: one prefill and one decode node
with fixed roles, so that every request is handed over.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from baton.gateway.fleet.placement import Route
from baton.load.goals import Goal
from baton.load.workload import PRESETS, LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.outcome import SimulatedOutcome
from bench.objective import GRIDS, goodputs
from bench.served import SLO, STRICT, figures

_RUNS = (("chat", 40, Goal()), ("chat", 70, Goal()), ("chat", 70, SLO), ("long", 4.5, Goal()))
_SPAN = LengthSpan(20.0, warmup_s=4.0)
_SEED = 0
_TTFTS_MS, _GAPS_MS = (40, 50, 70, 100), (10, 12, 15, 20, 25)


def _specs() -> Sequence[tuple[str, ClusterSpec]]:
    return tuple((name, replace(STRICT, smooth_starts=waits)) for name, waits in (("at once", False), ("waits", True)))


def _first_gaps_ms(outcome: SimulatedOutcome) -> tuple[float, ...]:
    """Gap between the first two tokens, p50, p90 and p99."""
    jobs = [job for job in outcome.counted if job.output > 1 and job.route is Route.REMOTE]
    gaps_s = [job.second_s - job.first_s for job in jobs]
    return tuple(1e3 * float(np.quantile(gaps_s, share)) for share in (0.5, 0.9, 0.99))


def table(write: Callable[[str], object]) -> None:
    """Writes Markdown tables: times in ms, then goodput in requests per second, at once / waits."""
    write("| load | first token | TTFT p50 / p99 | first gap p50 / p90 / p99 | p99 gap of a request p50 | TPOT p50 |")
    write("| --- | --- | --- | --- | --- | --- |")
    for load, rate, goal in _RUNS:
        planned = Synthetic(*PRESETS[load]).plan(rate, _SPAN, _SEED)
        for name, spec in _specs():
            outcome = simulate(spec, goal, planned)
            ttft, late, tpot, _, _, gap = figures(outcome)
            first = " / ".join(f"{each:.1f}" for each in _first_gaps_ms(outcome))
            slo = "" if goal == Goal() else ", SLO"
            write(f"| {load} {rate:g}/s{slo} | {name} | {ttft:.1f} / {late:.1f} | {first} | {gap:.2f} | {tpot:.2f} |")
    chat = replace(GRIDS[0], ttfts_ms=_TTFTS_MS, gaps_ms=_GAPS_MS)
    (_, at_once), (_, waits) = (
        goodputs(chat, replace(spec, host=replace(spec.host, gateways=2))) for _, spec in _specs()
    )
    write(f"\n| TTFT \\ p99 gap of a request | {' | '.join(f'{gap} ms' for gap in _GAPS_MS)} |")
    write("| --- |" + " --- |" * len(_GAPS_MS))
    for row, ttft_ms in enumerate(_TTFTS_MS):
        cells = (f"{one:.3g} / {other:.3g}" for one, other in zip(at_once[row], waits[row], strict=True))
        write(f"| {ttft_ms} ms | {' | '.join(cells)} |")


if __name__ == "__main__":
    table(lambda line: print(line, flush=True))
