"""A gateway's CPU time per served request: without traces, with traces of a tenth of all requests, and with traces of
all.

Three real gateways serve the same streamed requests at the same time, from one pair of scripted nodes, so other work on
the machine affects all three alike.

The cost of traces does not depend on the length of the output. It is measured with short outputs, whose own cost hides
less of it. Then it is compared with the cost of a request of usual length: the mean of ShareGPT's conversations, as the
vLLM paper has it.
"""

import asyncio
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import orjson
import uvloop

from baton.cli.processes import Process, Processes
from bench import scripted_pair
from bench.scripted_decode import MODEL
from bench.table import Row

GOAL_PERCENT = 1.0
SHORT_ROUNDS, USUAL_ROUNDS = 80, 8
_STREAMS, _BURSTS = 32, 4
_TIMEOUT_S = 120.0
_SETTLE_S = 0.7  # until the last traces are exported
_OFF, _TENTH, _ALL = "off", "10 % exported", "all exported"
_SAMPLED = {_OFF: None, _TENTH: 0.1, _ALL: 1.0}


class Shape(NamedTuple):
    """Tokens of each request."""

    prompt: int
    output: int

    @property
    def work(self) -> str:
        return f"{_STREAMS} requests at once, {self.prompt} tokens in, {self.output} out"


_SHORT, _USUAL = Shape(64, 4), Shape(161, 338)


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
            gateways = {}
            for name, sampled in _SAMPLED.items():
                os.environ.update(_variables(addresses, sampled))
                gateways[name] = processes.start("gateway", _flags(addresses))
            processes.wait_ready(list(gateways.values()))
            return rows_of(uvloop.run(_measure(gateways, short_rounds, usual_rounds, progress)))
    finally:
        nodes.terminate()
        nodes.join()


def rows_of(measured: Measured) -> list[Row]:
    without = measured.short[_OFF]
    usual_us = statistics.median(measured.usual)
    rows = [
        Row("CPU a request, no traces", _SHORT.work, statistics.median(without), "us"),
        Row("CPU a request, no traces", _USUAL.work, usual_us, "us"),
    ]
    for name in (_TENTH, _ALL):
        added = Middle.of([one - other for one, other in zip(measured.short[name], without, strict=True)])
        pairs = f"median of {len(without)} pairs of rounds"
        rows += [
            Row(f"added, {name}", pairs, added.median, "us", less_is_better=True),
            Row(f"added, {name}: standard error", pairs, added.error, "us"),
            Row(
                f"added, {name}: share",
                f"of a request with {_USUAL.output} tokens out",
                100 * added.median / usual_us,
                "%",
                limit=GOAL_PERCENT if name == _TENTH else None,
                less_is_better=True,
            ),
        ]
    return rows


def _variables(addresses: scripted_pair.Addresses, sampled: float | None) -> dict[str, str]:
    """Which requests a gateway that starts next exports; None: it exports nothing."""
    endpoint = "" if sampled is None else f"http://{addresses.collector}"
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER_ARG": str(sampled or 0.0)}


def _flags(addresses: scripted_pair.Addresses) -> list[str]:
    flags = ["--model", str(MODEL), "--prefill", addresses.prefill, "--decode", addresses.decode]
    return [*flags, "--local-policy", "strict"]


async def _measure(
    gateways: dict[str, Process], short_rounds: int, usual_rounds: int, progress: Callable[[str], None]
) -> Measured:
    short: dict[str, list[float]] = {name: [] for name in gateways}
    for number in range(short_rounds + 1):
        progress(f"tracing: round {number} of {short_rounds}")
        used_us = await _round(gateways, _SHORT, _BURSTS)
        if number:  # the first one warms up
            for name, each_us in used_us.items():
                short[name].append(each_us)
    usual = []
    for number in range(usual_rounds):
        progress(f"tracing: {_USUAL.output} tokens, round {number + 1} of {usual_rounds}")
        usual.append((await _round({_OFF: gateways[_OFF]}, _USUAL, 1))[_OFF])
    return Measured(short, usual)


async def _round(gateways: Mapping[str, Process], shape: Shape, bursts: int) -> dict[str, float]:
    """CPU microseconds of each gateway per request."""
    before_s = {name: _cpu_s(gateway) for name, gateway in gateways.items()}
    for _ in range(bursts):
        await asyncio.gather(*(_burst(gateway, shape) for gateway in gateways.values()))
    await asyncio.sleep(_SETTLE_S)
    count = bursts * _STREAMS
    return {name: 1e6 * (_cpu_s(gateway) - before_s[name]) / count for name, gateway in gateways.items()}


async def _burst(gateway: Process, shape: Shape) -> None:
    where = urlsplit(gateway.http or "")
    loop = asyncio.get_running_loop()
    ended = []
    for _ in range(_STREAMS):
        _, client = await loop.create_connection(lambda: _Client(shape), str(where.hostname), where.port or 0)
        ended.append(client.ended)
    for answer in await asyncio.wait_for(asyncio.gather(*ended), _TIMEOUT_S):
        assert b"data: [DONE]" in answer, answer


class _Client(asyncio.Protocol):
    """One streamed completion, whose last bytes it keeps and parses nothing."""

    def __init__(self, shape: Shape) -> None:
        prompt = list(range(10, 10 + shape.prompt))
        body = orjson.dumps({"prompt": prompt, "max_tokens": shape.output, "stream": True})
        head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._last = b""
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        self._last = (self._last + data)[-1000:]

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(self._last)


def _cpu_s(process: Process) -> float:
    """CPU time of all threads of another process: Linux has a clock for each process, exact to nanoseconds."""
    return time.clock_gettime((~process.pid << 3) | 2)
