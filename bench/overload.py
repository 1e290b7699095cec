"""Goodput of a small cluster at its capacity and far above it, with default settings: real processes on the CPU.

The capacity is measured first, by as many requests at once as the decode node takes. Then requests arrive at random
times at multiples of it, each with a deadline; the best of these rounds is the peak. A light user sends one request
after the other from an address of its own: alone, next to a client that keeps 150 requests open, and next to one that
keeps 3,000 open. Last comes a long round at ten times the capacity, with the memory of all processes.

The nodes have one half of the cores, and the gateway and the clients the other one, as if they ran on separate
machines. On shared cores, each refusal would slow the nodes. `python -m bench.overload` takes about five minutes; its
arguments are the seconds of a round, and of the long one.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import psutil

from baton.cli.processes import Processes
from baton.client.client import AsyncClient
from baton.client.outputs import Finished
from baton.core.errors import BatonError
from baton.core.sampling import SamplingParams
from baton.gateway.serving.admission import NO_ROOM, TOO_LATE
from baton.settings.config import DEMO_MODELS, MIB
from bench.table import Row, print_rows

MODEL = DEMO_MODELS / "llama"
DEADLINE_S = 6.0
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
ROUND_S = 15.0
LONG_S = 60.0  # the goal is for ten minutes
LOADS = (1.0, 1.5, 3.0, 10.0)
GOODPUT_GOAL, REFUSAL_GOAL_S, LIGHT_GOAL = 0.9, 0.05, 3.0
# From the middle to the end of the long round; allocators vary by so much.
GROWTH_GOAL = 1.02
_CAPACITY_AT_ONCE = 48
_HEAVY_AT_ONCE = 150
_OPEN_AT_ONCE = 3000
_LIGHT_REQUESTS = 25
_LIGHT_PAUSE_S = 0.2
_LIGHT_ADDRESS = "127.0.0.2"
_LIGHT_TIMEOUT_S = 10 * DEADLINE_S
_PAUSE_S = 2.0
# Parts of the messages of requests that the gateway took, and gave up while they waited.
_AFTER_WAITING = (TOO_LATE, NO_ROOM)

Progress = Callable[[str], None]


@dataclass
class Outcome:
    """What became of the requests of one round."""

    good: int = 0
    seconds: list[float] = field(default_factory=list)  # of good requests
    refused_s: list[float] = field(default_factory=list)  # until a refusal with a hint, of requests that did not wait
    shed_s: list[float] = field(default_factory=list)  # likewise, of requests that did
    errors: Counter[str] = field(default_factory=Counter)


def run(progress: Progress, round_s: float = ROUND_S, long_s: float = LONG_S) -> Iterator[Row]:
    with Processes(progress) as processes:
        cores = sorted(os.sched_getaffinity(0))
        half = (len(cores) + 1) // 2
        flags = ["--model", str(MODEL), "--device", "cpu"]
        with _on_cores(cores[:half]):
            nodes = [processes.start(program, flags) for program in ("prefill_node", "decode_node")]
        processes.wait_ready(nodes)
        os.sched_setaffinity(0, cores[half:] or cores)
        ends = ["--prefill", nodes[0].address, "--decode", nodes[1].address]
        gateway = processes.start("gateway", ["--model", str(MODEL), *ends])
        processes.wait_ready([gateway])
        assert gateway.http is not None
        names = {"gateway": gateway.pid, "prefill node": nodes[0].pid, "decode node": nodes[1].pid}
        measured = {name: psutil.Process(pid) for name, pid in names.items()}
        yield from asyncio.run(_measure(gateway.address, gateway.http, measured, progress, round_s, long_s))


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Processes that start within the block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _measure(
    target: str, http: str, processes: Mapping[str, psutil.Process], progress: Progress, round_s: float, long_s: float
) -> list[Row]:
    async with AsyncClient(target, retry_s=0.0) as client:
        for _ in range(2):  # the first round warms up
            capacity = await _capacity(client, round_s)
        progress(f"capacity {capacity:.1f} a second")
        rows = [Row("capacity", f"{_CAPACITY_AT_ONCE} requests at once", capacity, "a second")]
        outcomes: dict[float, Outcome] = {}
        cpu_s: dict[float, float] = {}
        for load in LOADS:
            before_s = _cpu_s(processes["gateway"])
            outcomes[load] = await _round(client, load * capacity, round_s)
            cpu_s[load] = _cpu_s(processes["gateway"]) - before_s
            progress(f"{load:g} times the capacity: {outcomes[load].good / round_s:.1f} a second")
            await asyncio.sleep(_PAUSE_S)
        peak = max(outcome.good for outcome in outcomes.values()) / round_s
        for load, outcome in outcomes.items():
            rows += _rows(load, outcome.good / round_s, peak, outcome)
        rows += _refusal_cost(outcomes, cpu_s)
        rows += await _beside(client, http)
        rows += await _long(client, LOADS[-1] * capacity, processes, long_s)
    return rows


def _rows(load: float, goodput: float, peak: float, outcome: "Outcome") -> list[Row]:
    work = f"{load:g} times the capacity, deadline {DEADLINE_S:g} s"
    rows = [Row("goodput", work, goodput, "a second", "at best", peak, GOODPUT_GOAL)]
    for name, count in sorted(outcome.errors.items()):
        rows.append(Row(f"ended with {name}", work, count, "requests"))
    if outcome.refused_s:
        median_s = statistics.median(outcome.refused_s)
        rows.append(Row("refused after, median", work, median_s, "s", limit=REFUSAL_GOAL_S))
        rows.append(Row("refused after, p99", work, _p99(outcome.refused_s), "s", limit=REFUSAL_GOAL_S))
    if outcome.shed_s:
        rows.append(Row("given up after waiting, p99", work, _p99(outcome.shed_s), "s"))
    return rows


def _refusal_cost(outcomes: Mapping[float, "Outcome"], cpu_s: Mapping[float, float]) -> list[Row]:
    """What the gateway spends at the highest load beyond what its good requests cost at the lowest one."""
    low, high = outcomes[LOADS[0]], outcomes[LOADS[-1]]
    if not low.good or not high.refused_s:
        return []
    refusals_s = cpu_s[LOADS[-1]] - high.good * cpu_s[LOADS[0]] / low.good
    work = f"{len(high.refused_s)} refusals at {LOADS[-1]:g} times the capacity"
    return [Row("the gateway's CPU time for a refusal", work, 1e6 * refusals_s / len(high.refused_s), "us")]


async def _beside(client: AsyncClient, http: str) -> list[Row]:
    """The light user alone, and next to clients with many requests."""
    alone = await _light(http)
    rows = [_light_row(alone, "alone")]
    for at_once in (_HEAVY_AT_ONCE, _OPEN_AT_ONCE):
        async with _heavy(client, at_once) as heavy:
            await asyncio.sleep(2 * _PAUSE_S)
            began_s, good = time.monotonic(), heavy.good
            beside = await _light(http)
            rate = (heavy.good - good) / (time.monotonic() - began_s)
        rows.append(_light_row(beside, f"beside {at_once} requests", limit_s=LIGHT_GOAL * _p99(alone.seconds)))
        rows.append(Row("the other client's goodput", f"with {at_once} requests beside a light user", rate, "a second"))
        await asyncio.sleep(2 * _PAUSE_S)
    return rows


def _light_row(outcome: "Outcome", where: str, *, limit_s: float | None = None) -> Row:
    work = f"{outcome.good} of {_LIGHT_REQUESTS} served, {where}"
    return Row("light user, p99", work, _p99(outcome.seconds), "s", limit=limit_s)


async def _long(client: AsyncClient, rate: float, processes: Mapping[str, psutil.Process], long_s: float) -> list[Row]:
    """Many requests for long: goodput, and memory at the start, in the middle and at the end."""
    readings: list[dict[str, float]] = []

    async def read() -> None:
        for pause_s in (0.1 * long_s, 0.4 * long_s, 0.45 * long_s):
            await asyncio.sleep(pause_s)
            readings.append({name: process.memory_info().rss / MIB for name, process in processes.items()})

    reader = asyncio.create_task(read())
    outcome = await _round(client, rate, long_s)
    await reader
    work = f"{LOADS[-1]:g} times the capacity for {long_s:g} s"
    rows = [Row("goodput", work, outcome.good / long_s, "a second")]
    for name in processes:
        start, middle, end = (reading[name] for reading in readings)
        rows.append(Row(f"memory of the {name}, start and middle", f"{work}; start {start:.0f} MiB", middle, "MiB"))
        rows.append(Row(f"memory of the {name}, end", work, end, "MiB", limit=GROWTH_GOAL * middle))
    return rows


async def _capacity(client: AsyncClient, round_s: float) -> float:
    """Requests per second, without deadlines, with as many at once as the nodes work on."""
    outcome, began_s = Outcome(), time.monotonic()
    until_s = began_s + round_s

    async def again() -> None:
        while time.monotonic() < until_s:
            pause_s = await _ask(client, outcome, timeout_s=None)
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(_CAPACITY_AT_ONCE):
            group.create_task(again())
    return outcome.good / (time.monotonic() - began_s)


async def _round(client: AsyncClient, rate: float, round_s: float) -> Outcome:
    outcome, rng = Outcome(), random.Random(int(rate))
    async with asyncio.TaskGroup() as group:
        began_s, at_s = time.monotonic(), 0.0
        while (at_s := at_s + rng.expovariate(rate)) < round_s:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            group.create_task(_ask(client, outcome, timeout_s=DEADLINE_S))
    return outcome


@asynccontextmanager
async def _heavy(client: AsyncClient, at_once: int) -> AsyncIterator[Outcome]:
    """Keeps so many requests open within the block."""
    outcome = Outcome()

    async def again() -> None:
        while True:
            pause_s = await _ask(client, outcome, timeout_s=None)
            await asyncio.sleep(pause_s)

    tasks = [asyncio.create_task(again()) for _ in range(at_once)]
    try:
        yield outcome
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _ask(client: AsyncClient, outcome: Outcome, *, timeout_s: float | None) -> float:
    """Returns after how many seconds to come again."""
    prompt = [random.randrange(10, 400) for _ in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    began_s = time.monotonic()
    try:
        async for event in client.generate(prompt, sampling, timeout_s=timeout_s):
            if isinstance(event, Finished):
                outcome.good += 1
                outcome.seconds.append(time.monotonic() - began_s)
    except BatonError as error:
        hint = " hinted" if error.retry_after_s is not None else ""
        outcome.errors[type(error).__name__ + hint] += 1
        if hint:
            waited = any(each in error.message for each in _AFTER_WAITING)
            (outcome.shed_s if waited else outcome.refused_s).append(time.monotonic() - began_s)
        return error.retry_after_s or 0.0
    return 0.0


async def _light(http: str) -> Outcome:
    """One request after the other, each on a connection of its own."""
    outcome = Outcome()
    for _ in range(_LIGHT_REQUESTS):
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_LIGHT_TIMEOUT_S):
                status = await _post(http)
        except TimeoutError:
            status = "timeout"
        outcome.errors[status] += 1
        if status == "200":
            outcome.good += 1
            outcome.seconds.append(time.monotonic() - began_s)
        await asyncio.sleep(_LIGHT_PAUSE_S)
    return outcome


async def _post(http: str) -> str:
    prompt = [random.randrange(10, 400) for _ in range(PROMPT_TOKENS)]
    body = json.dumps({"model": "llama", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}).encode()
    at = urlsplit(http)
    reader, writer = await asyncio.open_connection(at.hostname, at.port, local_addr=(_LIGHT_ADDRESS, 0))
    try:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        )
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        return (await reader.read()).split(maxsplit=2)[1].decode()
    finally:
        writer.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))] if seconds else float("nan")


if __name__ == "__main__":
    print_rows("Overload", list(run(lambda line: print(line, file=sys.stderr), *map(float, sys.argv[1:]))))
