"""The gateway's CPU time per streamed token, of all its processes together, through HTTP and through gRPC.

A scripted decode node sends each stream one token a step. At a slow pace every token is a message of its own; at twice
what the gateway can send, tokens merge, and the longest pause of a stream shows how fair it is. The gateway is a real
one with default settings, of one and of several processes; node and clients run in other processes, and the clients
parse next to nothing. Figures in CPU time hold on a busy machine too; the others need idle cores.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from baton.cli.processes import Process, Processes
from baton.core.regular_file import write_regular_file
from baton.protos.v1 import generation_pb2
from bench import bare_grpc, scripted_decode
from bench.door_load import Load, Pace, SseClient, Stream
from bench.h2_client import GrpcConnection
from bench.scripted_decode import FIRST_STEP_S, MODEL
from bench.table import Row

ROUNDS = 2
ALONE_GOAL_US, MERGED_GOAL_US = 50.0, 1e6 / 60_000
PAUSE_GOAL_MS = 100.0
WORKERS = (1, 2, 4)
_PROMPT = list(range(10, 74))
_STREAMS_PER_CONNECTION = 8
_TIMEOUT_S = 120.0
_LOOK_S = 0.005  # between looks of the clients at their own pauses

_ALONE_STREAMS, _ALONE_STEPS, _ALONE_TOKENS_PER_S = 256, 40, 4000
_MERGED_STREAMS, _MERGED_STEPS, _MERGED_TOKENS_PER_S = 512, 250, 120_000


def paces(workers: int) -> tuple[Pace, Pace]:
    """One at which each token is a message, and one at about twice what so many processes can send."""
    return (
        Pace("alone", _ALONE_STREAMS, _ALONE_STEPS, _ALONE_STREAMS / _ALONE_TOKENS_PER_S),
        Pace("merged", _MERGED_STREAMS, _MERGED_STEPS * workers, _MERGED_STREAMS / (_MERGED_TOKENS_PER_S * workers)),
    )


@dataclass(frozen=True)
class Cost:
    """One round, from the second token of each stream on.

    Attributes:
        busy: CPU seconds of the busiest process of the gateway over seconds.
        pause_ms: the longest pause of the worst stream, over the mean pause.
        unfair_ms: the same, over the longest pause of the median stream: what is not a pause of all streams.
        client_pause_ms: of the clients' own process, which the pauses above include.
        fairness: as `Load.fairness`.
    """

    cpu_us: float  # a token, of all processes of the gateway
    messages: float  # a token
    tokens_per_s: float
    busy: float
    pause_ms: float
    unfair_ms: float
    mean_pause_ms: float
    client_pause_ms: float
    fairness: float


@dataclass(frozen=True)
class DoorRow(Row):
    """A row for one number of the gateway's processes; 0: of no gateway."""

    workers: int = 0

    def cells(self) -> tuple[str, ...]:
        name, *more = super().cells()
        return (f"{name} ({self.workers})" if self.workers else name, *more)


def run(progress: Callable[[str], None]) -> list[Row]:
    """The rows of this benchmark; takes three minutes where cores are idle."""
    rows: list[Row] = []
    cores = os.cpu_count() or 1
    for workers in WORKERS:
        if workers > max(2, cores - 2):
            progress(f"http_door: no figures for {workers} workers, which need {workers + 2} cores of {cores}")
            continue
        rows += measure(workers, progress)
    return rows


def write_markdown(title: str, rows: Sequence[Row], path: Path) -> None:
    """Writes one table with a column for each number of processes; makes the directory."""
    counts = sorted({row.workers for row in rows if isinstance(row, DoorRow) and row.workers})
    figures: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        work = row.work.partition(", ")[0]
        figures.setdefault((row.name, work), {})[row.workers if isinstance(row, DoorRow) else 0] = row
    heads = ["what", "work", *(f"{count} process{'es' if count > 1 else ''}" for count in counts), "goal"]
    lines = [f"# {title}", "", _line(heads), _line(["---"] * len(heads))]
    for (name, work), found in figures.items():
        any_row = next(iter(found.values()))
        cells = [found[count].cells()[2] if count in found else "" for count in counts]
        if 0 in found:
            cells[0] = found[0].cells()[2]
        lines.append(_line([name, work, *cells, any_row.cells()[-1]]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_regular_file(path, "\n".join(lines) + "\n")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def measure(workers: int, progress: Callable[[str], None]) -> list[Row]:
    """The rows of a gateway of so many processes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pace = context.Array("d", [0.0, 0.0], lock=False)
    node = context.Process(target=scripted_decode.serve, args=(theirs, pace), daemon=True)
    node.start()
    try:
        with Processes(progress) as processes:
            flags = ["--model", str(MODEL), "--decode", ours.recv(), "--local-policy", "local"]
            gateway = processes.start("gateway", [*flags, "--workers", str(workers)])
            processes.wait_ready([gateway])
            return uvloop.run(_measure(gateway, workers, pace, progress))
    finally:
        node.terminate()
        node.join()


async def _measure(gateway: Process, workers: int, shared: Any, progress: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for pace in paces(workers):
        shared[0], shared[1] = pace.streams, pace.step_s
        for name, door in DOORS.items():
            if workers > 1 and name == CHAT:
                continue
            rounds, bare = [], []
            for number in range(ROUNDS + 1):
                progress(f"http_door: {workers} process(es), {name}, {pace.name}, round {number} of {ROUNDS}")
                cost = await _round(gateway, door, pace)
                if number:  # the first one warms up
                    rounds.append(cost)
                if number and workers == 1 and name == GRPC and pace.name == "alone":
                    # In turns, because other work on the machine moves both figures.
                    bare.append(await asyncio.to_thread(bare_grpc.cpu_us, pace.streams, _ALONE_STEPS, pace.step_s))
            rows += _rows(name, workers, pace, rounds)
            if bare:
                what = "grpc.aio alone, a constant message: CPU a message"
                rows.append(DoorRow(what, pace.work, statistics.median(bare), "us", less_is_better=True))
    return rows


def _rows(door: str, workers: int, pace: Pace, rounds: Sequence[Cost]) -> Iterable[Row]:
    merged = pace.name == "merged"

    def row(name: str, of: Callable[[Cost], float], unit: str, limit: float | None = None) -> Row:
        middle = statistics.median(map(of, rounds))
        what = f"{door}, {pace.name}: {name}"
        return DoorRow(what, pace.work, middle, unit, limit=limit, less_is_better=True, workers=workers)

    yield row("messages a token", lambda cost: cost.messages, "")
    if not merged:
        yield row("CPU a message", lambda cost: cost.cpu_us / cost.messages, "us", ALONE_GOAL_US)
    else:
        yield row("CPU a token", lambda cost: cost.cpu_us, "us", round(MERGED_GOAL_US, 1))
        yield row("delivered", lambda cost: cost.tokens_per_s, "tok/s")
        yield row("busiest process", lambda cost: cost.busy, "cores")
        yield row("mean pause", lambda cost: cost.mean_pause_ms, "ms")
        yield row("longest pause over the mean", lambda cost: cost.pause_ms, "ms", PAUSE_GOAL_MS)
        yield row("the same over the median stream's longest", lambda cost: cost.unfair_ms, "ms")
        yield row("longest pause of the clients' process", lambda cost: cost.client_pause_ms, "ms")
        yield row("first stream's end over the last one's", lambda cost: cost.fairness, "")


async def _round(gateway: Process, door: "Door", pace: Pace) -> Cost:
    load = Load(pace)
    root = psutil.Process(gateway.pid)
    processes = [root, *root.children(recursive=True)]
    clients = await door(gateway, load)
    await asyncio.wait_for(load.all_begun.wait(), _TIMEOUT_S)
    messages, cpu_s, from_s = load.messages, [_cpu_s(process) for process in processes], time.monotonic()
    looking = asyncio.create_task(_look_at_own_pauses(load))
    await asyncio.wait_for(asyncio.gather(*clients), _TIMEOUT_S)
    looking.cancel()
    seconds = time.monotonic() - from_s - FIRST_STEP_S
    tokens = pace.streams * (pace.output_tokens - 1)
    used_s = [_cpu_s(process) - before_s for process, before_s in zip(processes, cpu_s, strict=True)]
    longest_s = load.longest_pauses_s
    return Cost(
        cpu_us=1e6 * sum(used_s) / tokens,
        messages=(load.messages - messages) / tokens,
        tokens_per_s=tokens / seconds,
        busy=max(used_s) / seconds,
        pause_ms=1e3 * (longest_s[-1] - load.mean_pause_s),
        unfair_ms=1e3 * (longest_s[-1] - statistics.median(longest_s)),
        mean_pause_ms=1e3 * load.mean_pause_s,
        client_pause_ms=1e3 * load.own_pause_s,
        fairness=load.fairness,
    )


async def _look_at_own_pauses(load: Load) -> None:
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(_LOOK_S)
        load.own_pause_s = max(load.own_pause_s, time.monotonic() - before_s - _LOOK_S)


Door = Callable[[Process, Load], "asyncio.Future[Sequence[asyncio.Future[None]]]"]


async def _http(path: str, body: Mapping[str, object], gateway: Process, load: Load) -> "list[asyncio.Future[None]]":
    where = urlsplit(gateway.http or "")
    asked = {**body, "max_tokens": load.pace.output_tokens, "stream": True}
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(load.pace.streams):
        _, client = await loop.create_connection(
            lambda: SseClient(path, asked, load), str(where.hostname), where.port or 0
        )
        clients.append(client.ended)
    return clients


async def _grpc(gateway: Process, load: Load) -> "list[asyncio.Future[None]]":
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=_PROMPT))
    request.sampling.max_tokens = load.pace.output_tokens
    data = request.SerializeToString()
    host, _, port = gateway.address.rpartition(":")
    calls: list[asyncio.Future[None]] = []
    while len(calls) < load.pace.streams:
        _, connection = await asyncio.get_running_loop().create_connection(GrpcConnection, host, int(port))
        for _ in range(_STREAMS_PER_CONNECTION):
            stream = load.stream()
            calls.append(connection.call("/baton.v1.Generation/Generate", data, partial(_came, load, stream)))
        asyncio.gather(*calls[-_STREAMS_PER_CONNECTION:]).add_done_callback(partial(_close, connection))
    return calls


def _close(connection: GrpcConnection, _: object) -> None:
    connection.transport.close()


def _came(load: Load, stream: Stream, _: bytes) -> None:
    stream.came(1)
    if stream.messages == 1:
        load.begins()


_CHAT_BODY = {"messages": [{"role": "user", "content": "Write the given bytes to the file."}]}
GRPC, CHAT = "gRPC, Generate", "HTTP, chat"
DOORS: dict[str, Any] = {
    GRPC: _grpc,
    "HTTP, completions": partial(_http, "/v1/completions", {"prompt": _PROMPT}),
    CHAT: partial(_http, "/v1/chat/completions", _CHAT_BODY),
}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
