"""What a streamed token costs the gateway: CPU seconds of all its processes over tokens, through HTTP and through gRPC.

A scripted decode node sends each stream one token a step. At a slow pace every token is a message of its own; at a
pace far above what the gateway can send, tokens merge, and the longest pause of a stream shows how fair it is. The
gateway is a real one with default settings; node and clients run in other processes, and the clients parse next to
nothing.
"""

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import orjson
import psutil
import uvloop

from baton.cli.processes import Process, Processes
from baton.config import DEMO_MODELS
from baton.rpc.status import client_may_leave
from bench.h2_client import GrpcConnection
from bench.table import Row
from decode_node.events import SessionMessage
from decode_node.gateway_sessions import GatewaySessions
from gateway.model import read_served_model
from protos.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, generation_pb2, node_pb2, node_pb2_grpc

MODEL = DEMO_MODELS / "llama"
ROUNDS = 3
ALONE_GOAL_US, MERGED_GOAL_US = 50.0, 1e6 / 60_000
PAUSE_GOAL_MS = 100.0
WORKERS = (1, 2, 4)
_INCARNATION = 21
_PROMPT = list(range(10, 74))
_TOKENS = range(300, 1300)  # of whole words, for the most part
_FIRST_STEP_S = 0.5  # until all clients have their first token
_STREAMS_PER_CONNECTION = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Pace:
    """What the scripted node does in one round: each step has a token for each stream."""

    name: str
    streams: int
    output_tokens: int
    step_s: float

    @property
    def work(self) -> str:
        return f"{self.streams} streams, a step each {1e3 * self.step_s:.0f} ms, {self.output_tokens} tokens out"


def paces(streams: int) -> tuple[Pace, Pace]:
    """One at which each token is a message, and one at some times what a gateway can send."""
    return Pace("alone", streams, 80, streams / 4000), Pace("merged", streams, 400, streams / 100_000)


class ScriptedDecode(node_pb2_grpc.NodeServicer, decode_pb2_grpc.DecodeServicer):
    """A decode node without a model: once all streams' requests are there, each step has a token for every one.

    Args:
        pace: streams and seconds per step of the present round, which another process sets.
    """

    def __init__(self, identity: common_pb2.ModelIdentity, pace: Sequence[float]) -> None:
        info = common_pb2.NodeInfo(
            name="scripted", role=common_pb2.ROLE_DECODE, incarnation=_INCARNATION, model=identity,
            max_context_tokens=4096, cache_shape=common_pb2.CacheShape(block_size=16, layout="NHD"),
        )  # fmt: skip
        self.status = node_pb2.NodeStatus(info=info, blocks_free=1 << 20, blocks_total=1 << 20)
        self._pace = pace
        self._sessions = GatewaySessions(self._deliver)
        self._batches: dict[int, list[decode_pb2.SubmitRequest]] = {}  # by session
        self._stepping: asyncio.Task[None] | None = None

    async def Watch(self, request: node_pb2.WatchRequest, context: object) -> AsyncIterator[node_pb2.NodeStatus]:
        while True:
            yield self.status
            await asyncio.sleep(1.0)

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.NodeStatus:
        return self.status

    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainResponse:
        raise NotImplementedError

    def Pair(
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        raise NotImplementedError

    def WatchCache(self, request: object, context: object) -> AsyncIterator[Any]:
        raise NotImplementedError

    async def Session(  # type: ignore[override]  # the stubs know generators only
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        with client_may_leave():
            await self._sessions.serve(context.peer(), requests, context.write)

    def _deliver(self, event: object) -> None:
        if not isinstance(event, SessionMessage) or not event.message.HasField("submit"):
            return
        request = event.message.submit
        accepted = decode_pb2.Accepted(key=request.key, why="scripted")
        self._sessions.send(event.session, decode_pb2.SessionResponse(accepted=accepted))
        self._batches.setdefault(event.session, []).append(request)
        if sum(map(len, self._batches.values())) == int(self._pace[0]):
            batches, self._batches = self._batches, {}
            self._stepping = asyncio.create_task(self._steps(batches))

    async def _steps(self, batches: dict[int, list[decode_pb2.SubmitRequest]]) -> None:
        steps = {session: decode_pb2.SessionResponse(step=decode_pb2.Step()) for session in batches}
        for session, batch in batches.items():
            for request in batch:
                steps[session].step.tokens.add(key=request.key, token=common_pb2.Token())
        output_tokens = next(iter(batches.values()))[0].sampling.max_tokens
        due_s = time.monotonic()
        for index in range(output_tokens):
            for session, response in steps.items():
                for step_token in response.step.tokens:
                    step_token.token.token_id = _TOKENS[(step_token.key * 7 + index) % len(_TOKENS)]
                    step_token.token.index = index
                    if index == output_tokens - 1:
                        step_token.finish_reason = common_pb2.FINISH_REASON_LENGTH
                self._sessions.send(session, _copy(response))
            due_s += self._pace[1] if index else _FIRST_STEP_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        for session, batch in batches.items():
            for request in batch:
                released = decode_pb2.Released(key=request.key)
                self._sessions.send(session, decode_pb2.SessionResponse(released=released))


def _copy(response: decode_pb2.SessionResponse) -> decode_pb2.SessionResponse:
    copy = decode_pb2.SessionResponse()
    copy.CopyFrom(response)
    return copy


def _serve_node(addresses: Connection, pace: Sequence[float]) -> None:
    """The scripted node's process."""

    async def serve() -> None:
        server = grpc.aio.server()
        node = ScriptedDecode(read_served_model(MODEL, None).identity, pace)
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
        node.status.info.address = address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        addresses.send(address)
        await server.wait_for_termination()

    uvloop.run(serve())


@dataclass
class Stream:
    """When the messages of one stream came."""

    first_s: float = 0.0
    last_s: float = 0.0
    messages: int = 0
    longest_s: float = 0.0  # between two messages

    def came(self, messages: int) -> None:
        now_s = time.monotonic()
        if self.messages:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        else:
            self.first_s = now_s
        self.last_s = now_s
        self.messages += messages


@dataclass
class Load:
    """What all clients of one round have received."""

    pace: Pace
    streams: list[Stream] = field(default_factory=list)
    begun: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def begins(self) -> None:
        self.begun += 1
        if self.begun == self.pace.streams:
            now_s = time.monotonic()
            for stream in self.streams:  # the pause before the second step is the node's
                stream.last_s, stream.longest_s = now_s + _FIRST_STEP_S, 0.0
            self.all_begun.set()

    @property
    def messages(self) -> int:
        return sum(stream.messages for stream in self.streams)

    @property
    def pause_s(self) -> float:
        """The longest pause of any stream, over the mean one of all."""
        return max(stream.longest_s for stream in self.streams) - self.mean_pause_s

    @property
    def mean_pause_s(self) -> float:
        spans = [(s.last_s - s.first_s - _FIRST_STEP_S) / max(1, s.messages - 1) for s in self.streams]
        return statistics.fmean(spans)


class SseClient(asyncio.Protocol):
    """One streamed completion; counts chunks and parses nothing else."""

    def __init__(self, path: str, body: dict[str, object], load: Load) -> None:
        data = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._request = head.encode() + data
        self._load, self._stream = load, load.stream()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        begun = self._stream.messages > 0
        if chunks := data.count(b"data: {"):
            self._stream.came(chunks)
            if not begun:
                self._load.begins()
        if b"data: [DONE]" in data or data.startswith(b"HTTP/1.1 4"):
            assert begun, data
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True)
class Cost:
    """One round, from the second token of each stream on.

    Attributes:
        busy: CPU seconds of the busiest process of the gateway over seconds.
    """

    cpu_us: float  # a token, of all processes of the gateway
    messages: float  # a token
    tokens_per_s: float
    busy: float
    pause_ms: float
    mean_pause_ms: float


def run(progress: Callable[[str], None]) -> list[Row]:
    """The rows of this benchmark; takes some minutes."""
    rows: list[Row] = []
    cores = os.cpu_count() or 1
    for workers in WORKERS:
        if workers > max(1, cores - 2) and workers > 2:
            progress(f"http_door: no figures for {workers} workers, which need {workers + 2} cores of {cores}")
            continue
        rows += measure(workers, progress)
    return rows


def measure(workers: int, progress: Callable[[str], None]) -> list[Row]:
    """The rows of a gateway of so many processes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    pace = context.Array("d", [0.0, 0.0], lock=False)
    node = context.Process(target=_serve_node, args=(theirs, pace), daemon=True)
    node.start()
    try:
        with Processes(progress) as processes:
            flags = ["--model", str(MODEL), "--decode", ours.recv(), "--local-policy", "local"]
            gateway = processes.start("gateway", [*flags, *(["--workers", str(workers)] if workers > 1 else [])])
            processes.wait_ready([gateway])
            return uvloop.run(_measure(gateway, workers, pace, progress))
    finally:
        node.terminate()
        node.join()


async def _measure(gateway: Process, workers: int, shared: Any, progress: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    for streams in (256, 512):
        for pace in paces(streams):
            shared[0], shared[1] = pace.streams, pace.step_s
            for name, door in DOORS.items():
                rounds = []
                for number in range(ROUNDS + 1):
                    progress(f"http_door: {workers} worker(s), {name}, {pace.name}, round {number} of {ROUNDS}")
                    cost = await _round(gateway, door, pace)
                    if number:  # the first one warms up
                        rounds.append(cost)
                rows += _rows(name, workers, pace, rounds)
    return rows


def _rows(door: str, workers: int, pace: Pace, rounds: Sequence[Cost]) -> Iterable[Row]:
    merged = pace.name == "merged"
    what = f"{door}, {pace.name}" + (f", {workers} workers" if workers > 1 else "")

    def row(name: str, of: Callable[[Cost], float], unit: str, limit: float | None = None) -> Row:
        middle = statistics.median(map(of, rounds))
        return Row(f"{what}: {name}", pace.work, middle, unit, limit=limit, less_is_better=unit != "tok/s")

    yield row("CPU a token", lambda cost: cost.cpu_us, "us", MERGED_GOAL_US if merged else ALONE_GOAL_US)
    yield row("messages a token", lambda cost: cost.messages, "")
    if merged:
        yield row("delivered", lambda cost: cost.tokens_per_s, "tok/s")
        yield row("busiest process", lambda cost: cost.busy, "cores")
        yield row("mean pause", lambda cost: cost.mean_pause_ms, "ms")
        yield row("longest pause over the mean", lambda cost: cost.pause_ms, "ms", PAUSE_GOAL_MS)


async def _round(gateway: Process, door: "Door", pace: Pace) -> Cost:
    load = Load(pace)
    root = psutil.Process(gateway.pid)
    processes = [root, *root.children(recursive=True)]
    clients = await door(gateway, load)
    await asyncio.wait_for(load.all_begun.wait(), _TIMEOUT_S)
    messages, cpu_s, from_s = load.messages, [_cpu_s(process) for process in processes], time.monotonic()
    await asyncio.wait_for(asyncio.gather(*clients), _TIMEOUT_S)
    seconds = time.monotonic() - from_s - _FIRST_STEP_S
    tokens = pace.streams * (pace.output_tokens - 1)
    used_s = [_cpu_s(process) - before_s for process, before_s in zip(processes, cpu_s, strict=True)]
    return Cost(
        cpu_us=1e6 * sum(used_s) / tokens,
        messages=(load.messages - messages) / tokens,
        tokens_per_s=tokens / seconds,
        busy=max(used_s) / seconds,
        pause_ms=1e3 * load.pause_s,
        mean_pause_ms=1e3 * load.mean_pause_s,
    )


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


_CHAT = {"messages": [{"role": "user", "content": "Write the given bytes to the file."}]}
DOORS: dict[str, Any] = {
    "HTTP, completions": partial(_http, "/v1/completions", {"prompt": _PROMPT}),
    "HTTP, chat": partial(_http, "/v1/chat/completions", _CHAT),
    "gRPC, Generate": _grpc,
}


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
