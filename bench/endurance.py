"""Thousands of small requests through one pair of node processes: does one of them grow, or keep what it should return?

Every request is handed over from the prefill to the decode node. Between batches nothing runs: then every block is
free and no lease is open, and memory and file descriptors of each process are read. `python -m bench.endurance 2000`
prints the table of so many requests.

An allocator takes what it will go on with at a time of its own, and then keeps it; a leak goes on. So a process that
grew is given as many requests again, and has leaked if it grows in every one of several rounds.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from baton.cli.processes import Process, Processes
from baton.client import Client
from baton.config import DEMO_MODELS
from baton.rpc.server import connect
from baton.types import Path, SamplingParams
from bench.table import Row, print_rows
from protos.baton.v1 import node_pb2, node_pb2_grpc

MODEL = DEMO_MODELS / "llama"
REQUESTS = 10_000
BATCHES = 20
ROUNDS = 4
CONCURRENT = 32
PROMPT_TOKENS = (3, 20)
OUTPUT_TOKENS = 2
SEED = 7
# Few, so that all have been written to before the second quarter: memory is real only then.
BLOCKS = 128
# What a process may grow by from the second quarter to the last: allocators and gRPC breathe by that much.
GROWTH_MIB_MAX = 2.0
GROWTH_MAX = 0.01
_QUIET_TIMEOUT_S = 60.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Reading:
    """One process between two batches."""

    rss_bytes: int
    files: int


@dataclass(frozen=True)
class Growth:
    """What a process held in the second quarter of the batches and in the last: medians, of files the fewest."""

    program: str
    before: Reading
    after: Reading

    @property
    def flat(self) -> bool:
        allowed = max(GROWTH_MIB_MAX * _MIB, GROWTH_MAX * self.before.rss_bytes)
        return self.after.rss_bytes - self.before.rss_bytes <= allowed and self.after.files <= self.before.files


def run(progress: Callable[[str], None], requests: int = REQUESTS) -> Iterator[Row]:
    """The rows of this benchmark; about ten seconds for each thousand requests.

    Args:
        requests: of one round. There is another one only while a process grows.

    Raises:
        RuntimeError: a process grew in every round, or a node kept a block or a lease.
    """
    with Processes(progress) as processes:
        flags = ["--model", str(MODEL), "--device", "cpu", "--num-blocks", str(BLOCKS)]
        prefill = processes.start("prefill_node", flags)
        decode = processes.start("decode_node", flags)
        processes.wait_ready([prefill, decode])
        ends = ["--prefill", prefill.address, "--decode", decode.address]
        gateway = processes.start("gateway", ["--model", str(MODEL), *ends, "--local-policy", "strict"])
        processes.wait_ready([gateway])
        watched = (prefill, decode, gateway)
        for number in range(1, ROUNDS + 1):
            began = time.monotonic()
            readings = asyncio.run(_endure(watched, requests, random.Random(SEED + number), progress))
            rate = requests / (time.monotonic() - began)
            growths = [growth_of(process.program, readings[process.pid]) for process in watched]
            grown = [growth.program for growth in growths if not growth.flat]
            if not grown:
                break
            progress(f"endurance: {', '.join(grown)} grew in round {number} of at most {ROUNDS}")
    work = f"{requests} requests, {CONCURRENT} at once" + (f", round {number}" if number > 1 else "")
    yield Row("requests handed over", work, rate, "a second")
    for growth in growths:
        yield from _rows(growth, work)
    if grown:
        raise RuntimeError("; ".join(f"still growing after {ROUNDS} rounds: {growth}" for growth in growths))


def growth_of(program: str, readings: Sequence[Reading]) -> Growth:
    """Args:
    readings: at even distances; four at least.
    """
    quarter = len(readings) // 4
    return Growth(program, _typical(readings[quarter : 2 * quarter]), _typical(readings[-quarter:]))


def _typical(readings: Sequence[Reading]) -> Reading:
    return Reading(
        int(statistics.median(reading.rss_bytes for reading in readings)),
        min(reading.files for reading in readings),  # a connection that is just being made or closed is no leak
    )


def _rows(growth: Growth, work: str) -> Iterator[Row]:
    before, after = growth.before, growth.after
    in_between = "second quarter"
    yield Row(
        f"{growth.program}, memory", work, after.rss_bytes / _MIB, "MiB", in_between, before.rss_bytes / _MIB,
        limit=(before.rss_bytes + max(GROWTH_MIB_MAX * _MIB, GROWTH_MAX * before.rss_bytes)) / _MIB,
    )  # fmt: skip
    yield Row(f"{growth.program}, open files", work, after.files, "files", in_between, before.files)


async def _endure(
    processes: Sequence[Process], requests: int, drawn: random.Random, progress: Callable[[str], None]
) -> dict[int, list[Reading]]:
    """What each process, by its pid, held after each batch."""
    prefill, decode, gateway = processes
    watched = {process.pid: psutil.Process(process.pid) for process in processes}
    readings: dict[int, list[Reading]] = {pid: [] for pid in watched}
    batch = -(-requests // BATCHES)
    async with Client(gateway.address) as client:
        for start in range(0, requests, batch):
            await _send(client, min(batch, requests - start), drawn)
            await _until_nothing_held(prefill, decode)
            for pid, process in watched.items():
                readings[pid].append(Reading(process.memory_info().rss, process.num_fds()))
            progress(f"endurance: {min(start + batch, requests)} of {requests} requests")
    return readings


async def _send(client: Client, requests: int, drawn: random.Random) -> None:
    """That many requests, so many at once."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = iter([drawn.choices(range(10, 2000), k=drawn.randint(*PROMPT_TOKENS)) for _ in range(requests)])

    async def work_through() -> None:
        for prompt in prompts:
            completion = await client.complete(prompt, params, timeout_s=60)
            if completion.receipt.path is not Path.REMOTE or len(completion.tokens) != OUTPUT_TOKENS:
                raise RuntimeError(f"not handed over whole: {completion.receipt}")

    await asyncio.gather(*(work_through() for _ in range(CONCURRENT)))


async def _until_nothing_held(*nodes: Process) -> None:
    for node in nodes:
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        async with connect(node.address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            while held := _held(await stub.Describe(node_pb2.DescribeRequest())):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{node.program} still holds {held} after {_QUIET_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.05)


def _held(status: node_pb2.NodeStatus) -> str:
    """What a node without requests should not hold; empty when all is well."""
    counts = {
        "requests": status.requests_running + status.requests_waiting,
        "leased blocks": status.blocks_leased,
        "used blocks": status.blocks_total - status.blocks_free,
        "refused segments": status.segments_refused,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def main(arguments: Sequence[str]) -> None:
    requests = int(arguments[0]) if arguments else REQUESTS
    rows: list[Row] = []
    try:
        rows.extend(run(lambda line: print(line, file=sys.stderr), requests))
    finally:
        print_rows("Endurance", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
