"""The responses of one Prefill call on their way to the gateway.

The machine's responses are queued, so that a slow gateway delays neither the sending of KV nor other calls.
"""

import asyncio
from collections.abc import Awaitable, Callable

from baton.core.errors import BatonError
from baton.protos.internal.v1 import prefill_pb2 as pb

Write = Callable[[pb.PrefillEvent], Awaitable[None]]


class ResponseStream:
    """`put` any number of responses, then `end` once."""

    def __init__(self) -> None:
        self._unwritten: asyncio.Queue[pb.PrefillEvent | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._error: BatonError | None = None

    def put(self, event: pb.PrefillEvent) -> None:
        self._unwritten.put_nowait(event)

    def end(self, error: BatonError | None) -> None:
        self._error = error
        self._unwritten.put_nowait(None)
        self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()

    async def write_all(self, write: Write) -> None:
        """Writes every response, at the pace of the gateway. An error at the end drops what is unwritten.

        Raises:
            BatonError: the error that the stream was ended with.
            ExceptionGroup: with what `write` has raised.
        """
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write_all(write))
            await self._ended.wait()
            if self._error is not None:
                writing.cancel()
        if self._error is not None:
            raise self._error

    async def _write_all(self, write: Write) -> None:
        while (event := await self._unwritten.get()) is not None:
            await write(event)
