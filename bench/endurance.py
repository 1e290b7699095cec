"""Sends thousands of small requests through one pair of node processes: no process may grow, or keep blocks or leases.

Every request is handed over from the prefill to the decode node. Between batches nothing runs; then every block must be
free and no lease open, and the memory and file descriptors of each process are read. An allocator may grow once at any
time, while a leak continues: a process has leaked if it grows in each of several rounds.
`python -m bench.endurance 2000` prints the table for 2000 requests.
"""

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from baton.cli.processes import Process, Processes, Running, launch
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.core.types import Path
from baton.protos.internal.v1 import node_pb2, node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.settings.config import DEMO_MODELS
from bench.table import Row, print_rows

MODEL = DEMO_MODELS / "llama"
REQUESTS = 10_000
BATCHES = 20
ROUNDS = 4
CONCURRENT = 32
PROMPT_TOKENS = (3, 20)
OUTPUT_TOKENS = 2
SEED = 7
# Few, so that all are written before the second quarter: memory counts only once it is written.
CACHE_MIB = 12  # 128 blocks
# Allowed growth from the second quarter to the last: allocators and gRPC vary by this much.
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
    """A process in the second and the last quarter of the batches: median memory, minimum of open files."""

    program: str
    before: Reading
    after: Reading

    @property
    def flat(self) -> bool:
        allowed = max(GROWTH_MIB_MAX * _MIB, GROWTH_MAX * self.before.rss_bytes)
        return self.after.rss_bytes - self.before.rss_bytes <= allowed and self.after.files <= self.before.files


def run(
    progress: Callable[[str], None],
    requests: int = REQUESTS,
    launch: Callable[[str, Sequence[str]], Running] = launch,
) -> Iterator[Row]:
    """The rows of this benchmark; about ten seconds for each thousand requests.

    Args:
        requests: requests of one round. Another round follows only while a process grows.
        launch: starts one program.

    Raises:
        RuntimeError: a process grew in every round, or a node kept a block or a lease.
    """
    with Processes(progress, launch) as processes:
        flags = ["--model", str(MODEL), "--device", "cpu", "--kv-cache-mib", str(CACHE_MIB)]
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
    """Compares the second and the last quarter of the readings.

    Args:
        readings: at even intervals; at least four.
    """
    quarter = len(readings) // 4
    return Growth(program, _typical(readings[quarter : 2 * quarter]), _typical(readings[-quarter:]))


def _typical(readings: Sequence[Reading]) -> Reading:
    return Reading(
        int(statistics.median(reading.rss_bytes for reading in readings)),
        min(reading.files for reading in readings),  # a connection being opened or closed is not a leak
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
    """The readings of each process after each batch, by pid."""
    prefill, decode, gateway = processes
    watched = {process.pid: psutil.Process(process.pid) for process in processes}
    readings: dict[int, list[Reading]] = {pid: [] for pid in watched}
    batch = -(-requests // BATCHES)
    async with AsyncClient(gateway.address) as client:
        for start in range(0, requests, batch):
            await _send(client, min(batch, requests - start), drawn)
            await _until_nothing_held(prefill, decode)
            for pid, process in watched.items():
                readings[pid].append(Reading(process.memory_info().rss, process.num_fds()))
            progress(f"endurance: {min(start + batch, requests)} of {requests} requests")
    return readings


async def _send(client: AsyncClient, requests: int, drawn: random.Random) -> None:
    """Sends this many requests, `CONCURRENT` at once. The first failure cancels the others."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = iter([drawn.choices(range(10, 2000), k=drawn.randint(*PROMPT_TOKENS)) for _ in range(requests)])

    async def send_prompts() -> None:
        for prompt in prompts:
            completion = await client.complete(prompt, params, timeout_s=60)
            if completion.receipt.path is not Path.REMOTE or len(completion.tokens) != OUTPUT_TOKENS:
                raise RuntimeError(f"not handed over whole: {completion.receipt}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENT):
            tasks.create_task(send_prompts())


async def _until_nothing_held(*nodes: Process) -> None:
    for node in nodes:
        deadline = time.monotonic() + _QUIET_TIMEOUT_S
        async with connect(node.address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            while held := _held(await stub.Describe(node_pb2.DescribeRequest())):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{node.program} still holds {held} after {_QUIET_TIMEOUT_S:.0f} s")
                await asyncio.sleep(0.05)


def _held(status: node_status_pb2.NodeStatus) -> str:
    """The counts of an idle node that are not zero, in words; empty if there are none."""
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
