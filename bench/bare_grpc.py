"""The lower bound of a grpc.aio server's cost per message: handlers that only write the same bytes."""

import asyncio
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import grpc
import psutil
import uvloop

from baton.rpc.channels import channel_options
from bench.h2_client import GrpcConnection

METHOD = "/bare.Bare/Stream"
_STREAMS_PER_CONNECTION = 8
_MESSAGE = b"\x0a\x05words" + b"\x12\x05\x08\xac\x02\x10\x05"  # as large as a message with one token
_PASS = 8  # streams that are woken in one pass of the loop
_KEEPALIVE_S = 5.0


def cpu_us(streams: int, steps: int, step_s: float) -> float:
    """CPU microseconds a message, of a process that sends each of the streams one message a step."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, streams, steps, step_s), daemon=True)
    server.start()
    try:
        return uvloop.run(_read(ours, streams))
    finally:
        server.terminate()
        server.join()


async def _read(server: Connection, streams: int) -> float:
    port: int = await asyncio.to_thread(server.recv)
    loop = asyncio.get_running_loop()
    calls: list[asyncio.Future[None]] = []
    connections: list[GrpcConnection] = []
    while len(calls) < streams:
        _, connection = await loop.create_connection(GrpcConnection, "127.0.0.1", port)
        connections.append(connection)
        calls += [connection.call(METHOD, b"", lambda _: None) for _ in range(_STREAMS_PER_CONNECTION)]
    await asyncio.gather(*calls)
    for connection in connections:
        connection.transport.close()
    measured: float = await asyncio.to_thread(server.recv)
    return measured


def _serve(results: Connection, streams: int, steps: int, step_s: float) -> None:
    async def run() -> None:
        queues: list[asyncio.Queue[bytes | None]] = []
        all_began = asyncio.Event()

        async def stream(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            queue: asyncio.Queue[bytes | None] = asyncio.Queue()
            queues.append(queue)
            if len(queues) == streams:
                all_began.set()
            while (message := await queue.get()) is not None:
                await context.write(message)

        method: Any = {METHOD.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(stream)}
        server = grpc.aio.server(options=channel_options(keepalive_s=_KEEPALIVE_S))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", method),))
        results.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await all_began.wait()
        before_s, due_s = _cpu_s(), time.monotonic()
        for _ in range(steps):
            for number, queue in enumerate(queues):
                queue.put_nowait(_MESSAGE)
                if number % _PASS == _PASS - 1:
                    await asyncio.sleep(0)
            due_s += step_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        used_s = _cpu_s() - before_s
        for queue in queues:
            queue.put_nowait(None)
        results.send(1e6 * used_s / (streams * steps))
        await server.wait_for_termination()

    uvloop.run(run())


def _cpu_s() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system
