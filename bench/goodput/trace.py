"""Latencies of each deployment under a recorded trace, at a rate that the deployments can serve. Each gets the same
requests at the same times."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from baton.core.types import Slo
from baton.load.goals import Goal
from baton.load.probe import probe
from baton.load.records import LoadRecord
from baton.load.results import Run
from baton.load.runner import Clients, RunOptions, default_processes
from baton.load.target import Target
from baton.load.traces import read_trace
from baton.load.workload import LengthSpan, TraceReplay
from bench.goodput.deployments import COLOCATED, ELASTIC, STATIC, colocated, disaggregated, this_machine
from bench.table import Row

# Of the trace's requests per second that one pair of H200s serves, and of a CPU.
_GPU_RATE, _CPU_RATE = 1.0, 0.5
_GPU_SPAN, _CPU_SPAN = LengthSpan(duration_s=60.0, warmup_s=5.0), LengthSpan(requests=3)
_CPU_TOKENS_MAX = 2048
_GOAL = Goal(ttft_s=6.0, tpot_s=0.03)


def run(progress: Callable[[str], None], path: Path) -> list[Row]:
    on_gpu = torch.cuda.is_available()
    machine = this_machine()
    trace = read_trace(path)
    rate = _GPU_RATE * len(machine.places) / 2 if on_gpu else _CPU_RATE
    runs: dict[str, Run] = {}
    with Clients(default_processes()) as clients:
        for start in (disaggregated, colocated):
            with start(machine, progress) as deployments:
                for deployment in deployments:
                    progress(f"{path.name}: {deployment.name}")
                    server = asyncio.run(probe(Target.parse(f"{deployment.name}={deployment.address}")))
                    replay = TraceReplay(trace, server.tokens_max if on_gpu else _CPU_TOKENS_MAX)
                    planned = replay.plan(rate, _GPU_SPAN if on_gpu else _CPU_SPAN, seed=1)
                    slo = Slo(_GOAL.ttft_s, _GOAL.tpot_s)
                    options = RunOptions(workload=path.name, drain_s=30.0, slo=slo)
                    runs[deployment.name] = clients.run(server, planned, options, rate=rate, seed=1)
    return list(_rows(runs, f"{path.name} at {rate:g} requests/s, {machine.model}, {machine.shape}"))


def _rows(runs: dict[str, Run], work: str) -> Iterator[Row]:
    for rival in (COLOCATED, STATIC):
        ours, theirs = runs[ELASTIC], runs[rival]
        for name, of, percent in (
            ("TTFT", _first_tokens_ms, "p50"),
            ("TTFT", _first_tokens_ms, "p99"),
            ("TPOT, mean of a request", _tpots_ms, "p50"),
            ("p99 gap of a request", _gaps_ms, "p50"),
        ):
            quantile = float(percent[1:]) / 100
            pair = [_quantile(of(run.counted), quantile) for run in (ours, theirs)]
            yield Row(f"{name}, {percent}", work, pair[0], "ms", rival, pair[1], less_is_better=True)
        good = [100 * run.good([_GOAL])[0] / run.summary.requests for run in (ours, theirs)]
        yield Row(f"good, {_GOAL}", work, good[0], "%", rival, good[1], 1.0)


def _first_tokens_ms(records: Sequence[LoadRecord]) -> list[float]:
    return [1e3 * found for record in records if (found := record.ttft_s) is not None]


def _tpots_ms(records: Sequence[LoadRecord]) -> list[float]:
    return [1e3 * found for record in records if (found := record.tpot_s) is not None]


def _gaps_ms(records: Sequence[LoadRecord]) -> list[float]:
    return [1e3 * found for record in records if (found := record.gap_quantile_s(0.99)) is not None]


def _quantile(values: Sequence[float], quantile: float) -> float:
    return sorted(values)[int(quantile * (len(values) - 1))] if values else float("nan")
