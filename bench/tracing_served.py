"""What traces cost a gateway end to end: CPU seconds of its process per served request, with traces off, of a tenth of
all requests, and of all.

Three real gateways serve the same streamed requests in turns, in an order that changes, from one pair of scripted
nodes: each round gives pairs of figures with the gateway without traces, so that other work on the machine moves both.
What traces add does not depend on the length of the output, so it is measured with short ones, whose own cost hides
less of it, and then compared with the cost of a request of usual length.
"""

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import uvloop

from baton.cli.processes import Process, Processes
from bench import scripted_pair
from bench.http_door import Load, Pace, SseClient
from bench.scripted_decode import MODEL
from bench.table import Row

GOAL_PERCENT = 1.0
SHORT_ROUNDS, USUAL_ROUNDS = 120, 10
_STREAMS = 32
_PROMPT = list(range(10, 74))
_SHORT_TOKENS, _USUAL_TOKENS = 4, 128
_TIMEOUT_S = 120.0
_SETTLE_S = 0.7  # until the last traces are exported
_OFF, _TENTH, _ALL = "off", "10 % exported", "all exported"
_SAMPLED = {_OFF: None, _TENTH: 0.1, _ALL: 1.0}


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


@dataclass(frozen=True)
class Measured:
    """CPU microseconds of a gateway per request, of each round.

    Attributes:
        short: of requests with short outputs, by how many are exported.
        usual: of requests of usual length, without traces.
    """

    short: Mapping[str, Sequence[float]]
    usual: Sequence[float]


def run(
    progress: Callable[[str], None], short_rounds: int = SHORT_ROUNDS, usual_rounds: int = USUAL_ROUNDS
) -> list[Row]:
    """The rows of this benchmark; takes eight minutes."""
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
            return rows_of(uvloop.run(_measure(gateways, short_rounds, usual_rounds, progress)))
    finally:
        nodes.terminate()
        nodes.join()


def rows_of(measured: Measured) -> list[Row]:
    without = measured.short[_OFF]
    usual_us = statistics.median(measured.usual)
    rows = [
        Row("CPU a request, no traces", _work(_SHORT_TOKENS), statistics.median(without), "us"),
        Row("CPU a request, no traces", _work(_USUAL_TOKENS), usual_us, "us"),
    ]
    for name in (_TENTH, _ALL):
        added = Middle.of([one - other for one, other in zip(measured.short[name], without, strict=True)])
        pairs = f"median of {len(without)} pairs of rounds"
        rows += [
            Row(f"added, {name}", pairs, added.median, "us", less_is_better=True),
            Row(f"added, {name}: standard error", pairs, added.error, "us"),
            Row(
                f"added, {name}: share",
                f"of a request with {_USUAL_TOKENS} tokens out",
                100 * added.median / usual_us,
                "%",
                limit=GOAL_PERCENT if name == _TENTH else None,
                less_is_better=True,
            ),
        ]
    return rows


def _work(tokens: int) -> str:
    return f"{_STREAMS} requests at once, {len(_PROMPT)} tokens in, {tokens} out"


def _flags(addresses: scripted_pair.Addresses, sampled: float | None) -> list[str]:
    flags = ["--model", str(MODEL), "--prefill", addresses.prefill, "--decode", addresses.decode]
    flags += ["--local-policy", "strict"]
    if sampled is None:
        return [*flags, "--otlp-endpoint", "off"]
    return [*flags, "--otlp-endpoint", f"http://{addresses.collector}", "--trace-sample", str(sampled)]


async def _measure(
    gateways: dict[str, Process], short_rounds: int, usual_rounds: int, progress: Callable[[str], None]
) -> Measured:
    short: dict[str, list[float]] = {name: [] for name in gateways}
    names = list(gateways)
    for number in range(short_rounds + 1):
        progress(f"tracing: round {number} of {short_rounds}")
        for name in names[number % len(names) :] + names[: number % len(names)]:
            used_us = await _round(gateways[name], _SHORT_TOKENS)
            if number:  # the first one warms up
                short[name].append(used_us)
    usual = []
    for number in range(usual_rounds):
        progress(f"tracing: {_USUAL_TOKENS} tokens, round {number + 1} of {usual_rounds}")
        usual.append(await _round(gateways[_OFF], _USUAL_TOKENS))
    return Measured(short, usual)


async def _round(gateway: Process, tokens: int) -> float:
    """CPU microseconds of the gateway per request."""
    before_s = _cpu_s(gateway)
    load = Load(Pace("served", _STREAMS, tokens, scripted_pair.STEP_S))
    where = urlsplit(gateway.http or "")
    body: dict[str, object] = {"prompt": _PROMPT, "max_tokens": tokens, "stream": True}
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
