"""The highest rate of requests that meets each SLO, for each deployment, as rows of a table."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from baton.core.types import Slo
from baton.load.goals import Goal
from baton.load.measure import Measurement
from baton.load.probe import probe
from baton.load.results import Found
from baton.load.runner import Clients, OnProgress, RunOptions, default_processes
from baton.load.target import Server, Target
from baton.load.workload import PRESETS, LengthSpan, Synthetic
from bench.goodput.deployments import (
    COLOCATED,
    ELASTIC,
    STATIC,
    Deployment,
    Machine,
    colocated,
    disaggregated,
    this_machine,
)
from bench.table import Row

# The latency bound of a search: on the mean time per token of a request, or on the 99th percentile of its own gaps.
MEAN, GAP = "mean", "p99 gap"


@dataclass(frozen=True)
class Plan:
    """What is searched.

    Args:
        workload: of `baton.load.workload.PRESETS`.
        tpots_s: the SLOs, each a search of its own, because requests carry it.
        start: the first rate, in requests per second.
        wanted: ratio to colocated nodes that the row's goal is, by TPOT in seconds; 1 for the others.
        duration_s, warmup_s: of each run.
        runs_max: of each search and deployment.
    """

    workload: str
    ttft_s: float
    tpots_s: Sequence[float]
    start: float
    wanted: dict[float, float]
    duration_s: float
    warmup_s: float = 2.0
    runs_max: int = 5
    precision: float = 0.1
    drain_s: float = 15.0


def measure(plan: Plan, progress: Callable[[str], None], machine: Machine | None = None) -> Iterator[Row]:
    """The rows: for each SLO, the elastic deployment's goodput with each other deployment as its rival."""
    machine = machine or this_machine()
    rates: dict[tuple[str, float, str], Found] = {}
    with Clients(default_processes()) as clients:
        for start in (disaggregated, colocated):
            rates |= _search(plan, machine, clients, start, progress)
    return _rows(plan, machine, rates)


Start = Callable[[Machine, Callable[[str], None]], AbstractContextManager[list[Deployment]]]


def _search(
    plan: Plan, machine: Machine, clients: Clients, start: Start, progress: Callable[[str], None]
) -> dict[tuple[str, float, str], Found]:
    """What was found, by deployment, TPOT and latency bound."""
    prompts, outputs = PRESETS[plan.workload]
    found: dict[tuple[str, float, str], Found] = {}
    with start(machine, progress) as deployments:
        targets = [Target.parse(f"{each.name}={each.address}") for each in deployments]
        servers: list[Server] = [asyncio.run(probe(target)) for target in targets]
        limits = [server.tokens_max for server in servers if server.tokens_max is not None]
        workload = Synthetic(prompts, outputs, tokens_max=min(limits, default=None))
        for tpot_s in plan.tpots_s:
            goals = {
                MEAN: Goal(ttft_s=plan.ttft_s, tpot_s=tpot_s),
                GAP: Goal(ttft_s=plan.ttft_s, gap_s=tpot_s),
            }
            measurement = Measurement(
                clients,
                workload,
                LengthSpan(duration_s=plan.duration_s, warmup_s=plan.warmup_s),
                RunOptions(workload=plan.workload, drain_s=plan.drain_s, slo=Slo(plan.ttft_s, tpot_s)),
                lambda title, total: _shown(progress, f"{title}: {total} requests"),
                seed=1,
            )
            _, answers = measurement.search(
                servers,
                list(goals.values()),
                start=plan.start,
                precision=plan.precision,
                runs_max=plan.runs_max,
            )
            for answer in answers:
                bound = next(name for name, goal in goals.items() if goal == answer.goal)
                found[answer.label, tpot_s, bound] = answer
                progress(f"{plan.workload} {answer.label}: {answer.rate:.3g}/s meet {answer.goal}")
    return found


def _shown(progress: Callable[[str], None], line: str) -> OnProgress:
    progress(line)
    return lambda _: None


def _rows(plan: Plan, machine: Machine, rates: dict[tuple[str, float, str], Found]) -> Iterator[Row]:
    for tpot_s in plan.tpots_s:
        for bound in (MEAN, GAP):
            ours = rates[ELASTIC, tpot_s, bound]
            name = f"goodput, TTFT {1e3 * plan.ttft_s:g} ms, {bound} {1e3 * tpot_s:g} ms"
            for rival in (COLOCATED, STATIC):
                theirs = rates[rival, tpot_s, bound]
                sure = "" if ours.complete and theirs.complete else ", not confirmed"
                work = f"{plan.workload}, {machine.model}, {machine.shape}{sure}"
                wanted = plan.wanted.get(tpot_s, 1.0) if rival == COLOCATED and bound == MEAN else 1.0
                yield Row(name, work, ours.rate, "requests/s", rival, theirs.rate or None, wanted)
