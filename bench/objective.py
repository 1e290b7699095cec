"""Goodput of the default, without an SLO, at a grid of bounds, against colocated nodes and fixed roles. Simulated.

`python -m bench.objective` prints bench/results/objective.md's tables. One run at each rate gives the shares within all
bounds of the grid. Goodput is the rate at which 90 % are within the bounds, by interpolation between the rates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.core.types import LocalPolicy
from baton.load.goals import Goal
from baton.load.workload import PRESETS, LengthSpan, Synthetic
from baton.planner.cluster import ClusterSpec, simulate
from baton.planner.measured import SERVED_HOST
from baton.planner.outcome import SimulatedOutcome
from bench.served import NODE, THEN

Table = NDArray[np.float64]
_SHARE = 0.9
_SEED = 0


@dataclass(frozen=True)
class Grid:
    """A load, its rates for two nodes in requests per second, and the bounds in ms."""

    load: str
    rates: Sequence[float]
    seconds: float
    ttfts_ms: Sequence[float]
    tpots_ms: Sequence[float]
    gaps_ms: Sequence[float]


GRIDS = (
    Grid("chat", range(10, 121, 10), 10.0, (30, 40, 50, 70, 100, 200, 400, 1000), (6, 7, 8, 10, 12, 15, 20, 30),
         (8, 10, 12, 15, 20, 25, 30, 40)),
    Grid("long", range(1, 11), 30.0, (200, 300, 400, 500, 700, 1000, 2000, 4000), (6, 7, 8, 10, 12, 15, 20, 30),
         (8, 10, 12, 15, 20, 25, 30, 40)),
)  # fmt: skip
SHAPES = ((1, 1), (2, 2))


def goodputs(grid: Grid, spec: ClusterSpec) -> tuple[Table, Table]:
    """Goodput for each TTFT (rows) and each TPOT, and each p99 gap, (columns), in requests per second of two nodes."""
    pairs = (spec.prefills + spec.decodes) / 2
    shares = []
    for rate in grid.rates:
        span = LengthSpan(grid.seconds / pairs, warmup_s=4.0)
        planned = Synthetic(*PRESETS[grid.load]).plan(pairs * rate, span, _SEED)
        shares.append(_shares(grid, simulate(spec, Goal(), planned)))
    return _crossing(grid.rates, [tpot for tpot, _ in shares]), _crossing(grid.rates, [gap for _, gap in shares])


def _shares(grid: Grid, outcome: SimulatedOutcome) -> tuple[Table, Table]:
    jobs = outcome.counted
    ttfts, tpots, gaps = (
        1e3 * np.array(values)
        for values in zip(*((job.ttft_s, job.tpot_s, job.gap_quantile_s(0.99)) for job in jobs), strict=True)
    )
    soon = ttfts[None, :] <= np.array(grid.ttfts_ms)[:, None]
    within = (tpots[None, :] <= np.array(grid.tpots_ms)[:, None], gaps[None, :] <= np.array(grid.gaps_ms)[:, None])
    tpot, gap = ((soon[:, None, :] & each[None, :, :]).mean(2) for each in within)
    return tpot, gap


def _crossing(rates: Sequence[float], shares: Sequence[Table]) -> Table:
    """The rate at which the share first falls below `_SHARE`."""
    found = np.zeros_like(shares[0])
    open_still = shares[0] >= _SHARE
    for number, (rate, share) in enumerate(zip(rates, shares, strict=True)):
        fails = open_still & (share < _SHARE)
        before, last = shares[number - 1], rates[number - 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            crossed = last + (rate - last) * (before - _SHARE) / (before - share)
        found = np.where(fails, crossed, np.where(open_still, rate, found))
        open_still &= share >= _SHARE
    return found


def compare(grid: Grid, prefills: int, decodes: int) -> list[tuple[str, Sequence[float], Table, Table]]:
    """The default's goodput, and the best of colocated nodes, with short and with long steps, and of fixed roles."""
    host = replace(SERVED_HOST, gateways=prefills + decodes)
    default = ClusterSpec(prefills, decodes, NODE, NODE, host=host)
    colocated = replace(default, prefills=0, decodes=prefills + decodes, policy=LocalPolicy.LOCAL)
    others = (colocated, replace(colocated, objective=THEN[grid.load]), replace(default, policy=LocalPolicy.STRICT))
    tables = [goodputs(grid, spec) for spec in others]
    ours = goodputs(grid, default)
    best = [np.max([each[number] for each in tables], axis=0) for number in (0, 1)]
    return [("TPOT", grid.tpots_ms, ours[0], best[0]), ("p99 gap", grid.gaps_ms, ours[1], best[1])]


def table(write: Callable[[str], object]) -> None:
    """Writes Markdown tables: goodput of the default / of the best other one, for two nodes."""
    for grid in GRIDS:
        for prefills, decodes in SHAPES:
            for name, bounds, ours, best in compare(grid, prefills, decodes):
                write(f"\n## {grid.load}, {prefills}P{decodes}D: TTFT and {name}\n")
                write(_summary(ours, best))
                write(f"\n| TTFT \\ {name} | {' | '.join(f'{bound:g} ms' for bound in bounds)} |")
                write("| --- |" + " --- |" * len(bounds))
                for row, ttft_ms in enumerate(grid.ttfts_ms):
                    cells = (f"{one:.3g} / {other:.3g}" for one, other in zip(ours[row], best[row], strict=True))
                    write(f"| {ttft_ms:g} ms | {' | '.join(cells)} |")


def _summary(ours: Table, best: Table) -> str:
    served = best > 0
    ratios = ours[served] / best[served]
    return (
        f"Of {served.sum()} points that another mode serves, the default has 0.97 or more of the best at "
        f"{(ratios >= 0.97).sum()} and 1.25 or more at {(ratios >= 1.25).sum()}; median {np.median(ratios):.2f}, "
        f"tenth {np.quantile(ratios, 0.1):.2f}. It serves {((best == 0) & (ours > 0)).sum()} points that no other does."
    )


if __name__ == "__main__":
    table(lambda line: print(line, flush=True))
