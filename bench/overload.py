"""Goodput of a small cluster at its capacity and far above it, with default settings: real processes on the CPU.

The capacity is measured first, by as many requests at once as the decode node takes. Then requests arrive at random
times at multiples of it, each with a deadline. Last, a light user sends one request after the other from an address of
its own, alone and beside a client that keeps 150 requests open. `python -m bench.overload` takes about three minutes;
an argument gives the seconds of each round.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from baton.cli.processes import Processes
from baton.client import Client, Finished
from baton.config import DEMO_MODELS
from baton.errors import BatonError
from baton.types import SamplingParams
from bench.table import Row, print_rows

MODEL = DEMO_MODELS / "llama"
DEADLINE_S = 6.0
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
ROUND_S = 15.0
LOADS = (1.0, 1.5, 3.0, 10.0)
GOODPUT_GOAL, REFUSAL_GOAL_S, LIGHT_GOAL = 0.9, 0.05, 3.0
_CAPACITY_AT_ONCE = 48
_HEAVY_AT_ONCE = 150
_LIGHT_REQUESTS = 25
_LIGHT_PAUSE_S = 0.2
_LIGHT_ADDRESS = "127.0.0.2"
_PAUSE_S = 2.0


@dataclass
class Outcome:
    """What became of the requests of one round."""

    good: int = 0
    seconds: list[float] = field(default_factory=list)  # of good requests
    refused_s: list[float] = field(default_factory=list)  # until a refusal with a hint
    errors: Counter[str] = field(default_factory=Counter)


def run(round_s: float = ROUND_S) -> Iterator[Row]:
    with Processes(lambda text: print(text, file=sys.stderr)) as processes:
        flags = ["--model", str(MODEL), "--device", "cpu"]
        nodes = [processes.start(program, flags) for program in ("prefill_node", "decode_node")]
        processes.wait_ready(nodes)
        ends = ["--prefill", nodes[0].address, "--decode", nodes[1].address]
        gateway = processes.start("gateway", ["--model", str(MODEL), *ends])
        processes.wait_ready([gateway])
        assert gateway.http is not None
        yield from asyncio.run(_measure(gateway.address, gateway.http, round_s))


async def _measure(target: str, http: str, round_s: float) -> list[Row]:
    rows = []
    async with Client(target) as client:
        for _ in range(2):  # the first round warms up
            capacity = await _capacity(client, round_s)
        rows.append(Row("capacity", f"{_CAPACITY_AT_ONCE} requests at once", capacity, "a second"))
        goodput: dict[float, float] = {}
        for load in LOADS:
            outcome = await _round(client, load * capacity, round_s)
            goodput[load] = outcome.good / round_s
            rows += _rows(load, goodput[load], goodput[LOADS[0]], outcome)
            await asyncio.sleep(_PAUSE_S)
        alone = await _light(http)
        heavy = asyncio.create_task(_heavy(client))
        await asyncio.sleep(2 * _PAUSE_S)
        beside = await _light(http)
        heavy.cancel()
        await asyncio.wait([heavy])
    alone_s, beside_s = _p99(alone.seconds), _p99(beside.seconds)
    rows.append(Row("light user, p99", f"{alone.good} of {_LIGHT_REQUESTS} served, alone", alone_s, "s"))
    work = f"{beside.good} of {_LIGHT_REQUESTS} served, beside {_HEAVY_AT_ONCE} requests"
    rows.append(Row("light user, p99", work, beside_s, "s", limit=LIGHT_GOAL * alone_s))
    return rows


def _rows(load: float, goodput: float, peak: float, outcome: Outcome) -> list[Row]:
    work = f"{load:g} times the capacity, deadline {DEADLINE_S:g} s"
    rows = [Row("goodput", work, goodput, "a second", "at 1 times", peak, GOODPUT_GOAL)]
    for name, count in sorted(outcome.errors.items()):
        rows.append(Row(f"ended with {name}", work, count, "requests"))
    if outcome.refused_s:
        median_s = statistics.median(outcome.refused_s)
        rows.append(Row("refused after, median", work, median_s, "s", limit=REFUSAL_GOAL_S))
        rows.append(Row("refused after, p99", work, _p99(outcome.refused_s), "s", limit=REFUSAL_GOAL_S))
    return rows


async def _capacity(client: Client, round_s: float) -> float:
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


async def _round(client: Client, rate: float, round_s: float) -> Outcome:
    outcome, rng = Outcome(), random.Random(int(rate))
    async with asyncio.TaskGroup() as group:
        began_s, at_s = time.monotonic(), 0.0
        while (at_s := at_s + rng.expovariate(rate)) < round_s:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            group.create_task(_ask(client, outcome, timeout_s=DEADLINE_S))
    return outcome


async def _heavy(client: Client) -> None:
    async def again() -> None:
        while True:
            pause_s = await _ask(client, Outcome(), timeout_s=None)
            await asyncio.sleep(pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(_HEAVY_AT_ONCE):
            group.create_task(again())


async def _ask(client: Client, outcome: Outcome, *, timeout_s: float | None) -> float:
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
            outcome.refused_s.append(time.monotonic() - began_s)
        return error.retry_after_s or 0.0
    return 0.0


async def _light(http: str) -> Outcome:
    """One request after the other, each on a connection of its own."""
    outcome = Outcome()
    for _ in range(_LIGHT_REQUESTS):
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
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


def _p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))] if seconds else float("nan")


if __name__ == "__main__":
    print_rows("Overload", list(run(*map(float, sys.argv[1:]))))
