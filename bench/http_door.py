"""What a streamed token costs the gateway: CPU seconds of its whole process over tokens, through HTTP and through gRPC.

A scripted decode node sends each stream one token a step, so that every token is a chunk of its own. The gateway is a
real one with default settings; nodes and clients run in other processes.
"""

import asyncio
import multiprocessing
import statistics
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import grpc
import orjson
import psutil

from baton.cli.processes import Process, Processes
from baton.config import DEMO_MODELS
from baton.rpc.server import connect
from bench.table import Row
from gateway.model import read_served_model
from protos.baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, generation_pb2, node_pb2, node_pb2_grpc
from protos.baton.v1.generation_pb2_grpc import GenerationStub

MODEL = DEMO_MODELS / "llama"
STREAMS = 256
OUTPUT_TOKENS = 120
STEP_S = 0.05
ROUNDS = 3
GOAL_US = 60.0
_INCARNATION = 21
_PROMPT = list(range(10, 74))
_TOKENS = range(300, 1300)  # of whole words, for the most part


class ScriptedDecode(node_pb2_grpc.NodeServicer, decode_pb2_grpc.DecodeServicer):
    """A decode node without a model: once `STREAMS` requests are there, each step has a token for every one."""

    def __init__(self, identity: common_pb2.ModelIdentity) -> None:
        info = common_pb2.NodeInfo(
            name="scripted", role=common_pb2.ROLE_DECODE, incarnation=_INCARNATION, model=identity,
            max_context_tokens=4096, cache_shape=common_pb2.CacheShape(block_size=16, layout="NHD"),
        )  # fmt: skip
        self.status = node_pb2.NodeStatus(info=info, blocks_free=1 << 20, blocks_total=1 << 20)

    async def Watch(self, request: node_pb2.WatchRequest, context: object) -> AsyncIterator[node_pb2.NodeStatus]:
        while True:
            yield self.status
            await asyncio.sleep(1.0)

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.NodeStatus:
        return self.status

    async def Drain(self, request: node_pb2.DrainRequest, context: object) -> node_pb2.DrainResponse:
        raise NotImplementedError

    async def WatchCache(
        self, request: node_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[node_pb2.WatchCacheResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this node publishes no cache events")
        yield node_pb2.WatchCacheResponse()  # makes it a generator, as gRPC expects of a streaming method

    def Pair(
        self, requests: AsyncIterator[decode_pb2.PairRequest], context: object
    ) -> AsyncIterator[decode_pb2.PairResponse]:
        raise NotImplementedError

    async def Session(
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: object
    ) -> AsyncIterator[decode_pb2.SessionResponse]:
        submitted: asyncio.Queue[decode_pb2.SubmitRequest] = asyncio.Queue()
        reading = asyncio.create_task(_read(requests, submitted))
        try:
            while True:
                batch = []
                for _ in range(STREAMS):
                    batch.append(await submitted.get())
                    yield decode_pb2.SessionResponse(accepted=decode_pb2.Accepted(key=batch[-1].key, why="scripted"))
                for index in range(OUTPUT_TOKENS):
                    await asyncio.sleep(STEP_S)
                    yield decode_pb2.SessionResponse(step=_step(batch, index))
                for request in batch:
                    yield decode_pb2.SessionResponse(released=decode_pb2.Released(key=request.key))
        finally:
            reading.cancel()


async def _read(
    requests: AsyncIterator[decode_pb2.SessionRequest], submitted: asyncio.Queue[decode_pb2.SubmitRequest]
) -> None:
    async for request in requests:
        if request.HasField("submit"):
            submitted.put_nowait(request.submit)


def _step(batch: Sequence[decode_pb2.SubmitRequest], index: int) -> decode_pb2.Step:
    last = index == OUTPUT_TOKENS - 1
    finish = common_pb2.FINISH_REASON_LENGTH if last else common_pb2.FINISH_REASON_UNSPECIFIED
    step = decode_pb2.Step()
    for request in batch:
        token_id = _TOKENS[(request.key * 7 + index) % len(_TOKENS)]
        token = common_pb2.Token(token_id=token_id, index=index)
        step.tokens.append(decode_pb2.StepToken(key=request.key, token=token, finish_reason=finish))
    return step


def _serve_node(addresses: Connection) -> None:
    """The scripted node's process."""

    async def serve() -> None:
        server = grpc.aio.server()
        node = ScriptedDecode(read_served_model(MODEL, None).identity)
        node_pb2_grpc.add_NodeServicer_to_server(node, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(node, server)
        node.status.info.address = address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        addresses.send(address)
        await server.wait_for_termination()

    asyncio.run(serve())


@dataclass
class Load:
    """What all clients of one round have received."""

    chunks: int = 0
    begun: int = 0
    all_begun: asyncio.Event = field(default_factory=asyncio.Event)

    def begins(self) -> None:
        self.begun += 1
        if self.begun == STREAMS:
            self.all_begun.set()


class SseClient(asyncio.Protocol):
    """One streamed completion; counts chunks and parses nothing else."""

    def __init__(self, path: str, body: dict[str, object], load: Load) -> None:
        data = orjson.dumps(body)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self._request = head.encode() + data
        self._load = load
        self._begun = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._load.chunks += data.count(b"data: {")
        if not self._begun and b"data: {" in data:
            self._begun = True
            self._load.begins()
        if b"data: [DONE]" in data or data.startswith(b"HTTP/1.1 4"):
            assert self._begun, data
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def run(progress: Callable[[str], None]) -> list[Row]:
    """The rows of this benchmark; takes about a minute."""
    ours, theirs = multiprocessing.Pipe()
    node = multiprocessing.get_context("spawn").Process(target=_serve_node, args=(theirs,), daemon=True)
    node.start()
    try:
        with Processes(progress) as processes:
            flags = ["--model", str(MODEL), "--decode", ours.recv(), "--local-policy", "local"]
            gateway = processes.start("gateway", flags)
            processes.wait_ready([gateway])
            return asyncio.run(_measure(gateway, progress))
    finally:
        node.terminate()
        node.join()


async def _measure(gateway: Process, progress: Callable[[str], None]) -> list[Row]:
    doors: dict[str, Door] = {"HTTP, completions": _completions, "gRPC, Generate": _grpc}
    if read_served_model(MODEL, None).chat.has_template:
        doors["HTTP, chat"] = _chat
    costs: dict[str, list[float]] = {name: [] for name in doors}
    shares: dict[str, list[float]] = {name: [] for name in doors}
    for round_number in range(ROUNDS + 1):
        for name, door in doors.items():
            progress(f"http_door: {name}, round {round_number} of {ROUNDS}")
            cost_us, share = await _round(gateway, door)
            if round_number:  # the first one warms up
                costs[name].append(cost_us)
                shares[name].append(share)
    work = f"{STREAMS} streams, a step each {1e3 * STEP_S:.0f} ms, {OUTPUT_TOKENS} tokens out"
    rows = []
    for name in doors:
        limit = GOAL_US if name.startswith("HTTP") else None
        rows.append(
            Row(f"{name}: CPU a token", work, statistics.median(costs[name]), "us", limit=limit, less_is_better=True)
        )
        rows.append(Row(f"{name}: chunks a token", work, statistics.median(shares[name]), ""))
    return rows


async def _round(gateway: Process, door: "Door") -> tuple[float, float]:
    """CPU of the gateway in us a token, and chunks a token, from the first token of the last stream on."""
    load = Load()
    process = psutil.Process(gateway.pid)
    clients = [asyncio.create_task(door(gateway, load)) for _ in range(STREAMS)]
    await asyncio.wait_for(load.all_begun.wait(), 60)
    chunks, cpu_s = load.chunks, _cpu_s(process)
    await asyncio.gather(*clients)
    tokens = STREAMS * OUTPUT_TOKENS - chunks
    return 1e6 * (_cpu_s(process) - cpu_s) / tokens, (load.chunks - chunks) / tokens


Door = Callable[[Process, Load], Coroutine[None, None, None]]


async def _completions(gateway: Process, load: Load) -> None:
    await _http(gateway, "/v1/completions", {"prompt": _PROMPT, "max_tokens": OUTPUT_TOKENS, "stream": True}, load)


async def _chat(gateway: Process, load: Load) -> None:
    messages = [{"role": "user", "content": "Write the given bytes to the file."}]
    body = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "stream": True}
    await _http(gateway, "/v1/chat/completions", body, load)


async def _http(gateway: Process, path: str, body: dict[str, object], load: Load) -> None:
    where = urlsplit(gateway.http or "")
    assert where.hostname is not None
    assert where.port is not None
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: SseClient(path, body, load), where.hostname, where.port)
    await client.ended


async def _grpc(gateway: Process, load: Load) -> None:
    async with connect(gateway.address) as channel:
        request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=_PROMPT))
        request.sampling.max_tokens = OUTPUT_TOKENS
        begun = False
        async for message in GenerationStub(channel).Generate(request):
            load.chunks += bool(message.tokens)
            if not begun:
                begun = True
                load.begins()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
