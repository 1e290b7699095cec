"""One side of a transfer in its own process, which tests kill and stop: commands and answers go over a pipe."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from baton.core.errors import BatonError
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import KVCacheLayout
from baton.kvcache.spec import KVCacheShape, KVCacheSpec, KVKind
from kvtransfer.transfer import KVTransfer
from tests.conformance.kv import DEADLINE_S, NodeEvents, make_transfer
from tests.warm import fork_server

# 1 MiB for 128 tokens of one layer, so that a request takes many messages that do not fit into any queue.
BIG = KVCacheSpec(KVKind.GQA, num_layers=16, num_kv_heads=8, head_dim=128, dtype="float32")
SHAPE = KVCacheShape(KVCacheLayout.NHD, block_size=16, num_blocks=64)
SEGMENT_BYTES = 1 << 20
STAGING_SLOTS = 4
# On a GPU a child compiles the kernels. Only a hanging child takes that long.
START_S = 300.0
ALL_BLOCKS = tuple(range(SHAPE.num_blocks))


def make_big(
    events: NodeEvents,
    *,
    incarnation: int,
    receive_bytes_per_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[PagedKVCache, KVTransfer]:
    cache = PagedKVCache(BIG, SHAPE)
    transfer = make_transfer(
        cache,
        events,
        transport="ucx",
        incarnation=incarnation,
        segment_bytes=SEGMENT_BYTES,
        staging_slots=STAGING_SLOTS,
        receive_bytes_per_s=receive_bytes_per_s,
        clock=clock,
    )
    return cache, transfer


# Creates the child's object, whose methods are the commands.
Make = Callable[[], AbstractAsyncContextManager[object]]


def make_filled() -> KVTransfer:
    cache, transfer = make_big(NodeEvents(), incarnation=0xC)
    cache.view.fill_(3.5)
    return transfer


def make_slow_receiver() -> KVTransfer:
    """Receives two segments a second, so that its test meets it in the middle of a request."""
    _, transfer = make_big(NodeEvents(), incarnation=0xC, receive_bytes_per_s=2 * SEGMENT_BYTES)
    return transfer


def serve(connection: Connection, make: Make) -> None:
    """The child's main: runs methods by name until it is killed."""
    torch.set_num_threads(1)
    asyncio.run(_serve(connection, make()))


async def _serve(connection: Connection, side: AbstractAsyncContextManager[object]) -> None:
    async with side:
        connection.send("ready")
        running = set()
        while True:
            method, arguments = await asyncio.to_thread(connection.recv)
            running.add(asyncio.create_task(_answer(connection, side, method, arguments)))


async def _answer(connection: Connection, side: object, method: str, arguments: tuple[Any, ...]) -> None:
    try:
        result = getattr(side, method)(*arguments)
        connection.send((method, await result if isinstance(result, Awaitable) else result))
    except (BatonError, AssertionError) as error:
        connection.send((method, error))


@dataclass(frozen=True)
class Child:
    pid: int
    connection: Connection

    def begin(self, method: str, *arguments: Any) -> None:
        self.connection.send((method, arguments))

    async def answer(self) -> tuple[str, Any]:
        """The next method to return, and what it returned or raised."""
        assert await asyncio.to_thread(self.connection.poll, DEADLINE_S)
        answer: tuple[str, Any] = self.connection.recv()
        return answer

    async def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        answered, result = await self.answer()
        assert answered == method
        if isinstance(result, AssertionError):
            raise result
        assert not isinstance(result, BatonError)
        return result


@asynccontextmanager
async def child(make: Make = make_filled) -> AsyncIterator[Child]:
    """One side of a transfer in a child process.

    Args:
        make: called in the child.
    """
    context = fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, make), daemon=True)
    process.start()
    theirs.close()
    try:
        assert await asyncio.to_thread(ours.poll, START_S)
        assert process.pid is not None
        assert ours.recv() == "ready"
        yield Child(process.pid, ours)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        process.close()
        ours.close()
