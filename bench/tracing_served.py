"""What traces cost a gateway end to end: CPU seconds of its process per served request, with traces off, of a tenth of
all requests, and of all.

Three real gateways serve the same streamed requests in turns, in an order that changes, from one pair of scripted
nodes: each round is a pair of figures with the one without traces, so that other work on the machine moves both.
"""

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

from baton.cli.processes import Process, Processes
from bench import scripted_pair
from bench.http_door import Load, Pace, SseClient
from bench.scripted_decode import MODEL
from bench.table import Row

GOAL_PERCENT = 1.0
ROUNDS = 40
_STREAMS, _OUTPUT_TOKENS, _PROMPT_TOKENS = 32, 128, 2048
_PROMPT = list(range(10, 10 + _PROMPT_TOKENS))
_TIMEOUT_S = 120.0
_SETTLE_S = 1.0  # until the last traces are exported
_OFF, _TENTH, _ALL = "off", "10 % exported", "all exported"
_SAMPLED = {_OFF: None, _TENTH: 0.1, _ALL: 1.0}
_WORK = f"{_STREAMS} requests at once, {_PROMPT_TOKENS} tokens in, {_OUTPUT_TOKENS} out"


@dataclass(frozen=True)
class Middle:
    """The median of some figures, and its standard error, which few outliers do not move."""

    median: float
    error: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Middle":
        median = statistics.median(figures)
        deviation = 1.4826 * statistics.median(abs(figure - median) for figure in figures)
        return cls(median, 1.2533 * deviation / math.sqrt(len(figures)))


def run(progress: Callable[[str], None], rounds: int = ROUNDS) -> list[Row]:
    """The rows of this benchmark; takes ten minutes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    nodes = context.Process(target=scripted_pair.serve, args=(theirs,), daemon=True)
    nodes.start()
    try:
        addresses: scripted_pair.Addresses = ours.recv()
        with Processes(progress) as processes:
            gateways = {
                name: processes.start("gateway", _flags(addresses, sampled)) for name, sampled in _SAMPLED.items()
            }
            processes.wait_ready(list(gateways.values()))
            return rows_of(uvloop.run(_measure(gateways, rounds, progress)))
    finally:
        nodes.terminate()
        nodes.join()


def rows_of(cpu_us: dict[str, list[float]]) -> list[Row]:
    """Args:
    cpu_us: CPU microseconds per request, of each round, by how many requests are exported.
    """
    rows = []
    for name, figures in cpu_us.items():
        rows.append(Row(f"gateway CPU a request, traces {name}", _WORK, Middle.of(figures).median, "us"))
    off = Middle.of(cpu_us[_OFF]).median
    for name, figures in cpu_us.items():
        if name == _OFF:
            continue
        added = Middle.of([with_it - without for with_it, without in zip(figures, cpu_us[_OFF], strict=True)])
        work = f"median of {len(figures)} pairs"
        limit = GOAL_PERCENT if name == _TENTH else None
        rows.append(Row(f"added, {name}", work, 100 * added.median / off, "%", limit=limit, less_is_better=True))
        rows.append(Row(f"added, {name}: standard error", work, 100 * added.error / off, "%"))
    return rows


def _flags(addresses: scripted_pair.Addresses, sampled: float | None) -> list[str]:
    flags = ["--model", str(MODEL), "--prefill", addresses.prefill, "--decode", addresses.decode]
    flags += ["--local-policy", "strict"]
    if sampled is None:
        return [*flags, "--otlp-endpoint", "off"]
    return [*flags, "--otlp-endpoint", f"http://{addresses.collector}", "--trace-sample", str(sampled)]


async def _measure(
    gateways: dict[str, Process], rounds: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in gateways}
    names = list(gateways)
    for number in range(rounds + 1):
        progress(f"tracing: round {number} of {rounds}")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            used_us = await _round(gateways[name])
            if number:  # the first one warms up
                found[name].append(used_us)
    return found


async def _round(gateway: Process) -> float:
    """CPU microseconds of the gateway per request."""
    before_s = _cpu_s(gateway)
    load = Load(Pace("served", _STREAMS, _OUTPUT_TOKENS, scripted_pair.STEP_S))
    where = urlsplit(gateway.http or "")
    body: dict[str, object] = {"prompt": _PROMPT, "max_tokens": _OUTPUT_TOKENS, "stream": True}
    ended = []
    for _ in range(_STREAMS):
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: SseClient("/v1/completions", body, load), str(where.hostname), where.port or 0
        )
        ended.append(client.ended)
    await asyncio.wait_for(asyncio.gather(*ended), _TIMEOUT_S)
    await asyncio.sleep(_SETTLE_S)
    return 1e6 * (_cpu_s(gateway) - before_s) / _STREAMS


def _cpu_s(process: Process) -> float:
    """CPU time of all threads of another process: Linux has a clock for each process, exact to nanoseconds."""
    return time.clock_gettime((~process.pid << 3) | 2)
