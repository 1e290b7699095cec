"""A TCP proxy for faults of one connection: a reset, or a cut of which nobody is informed."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

_LINGER_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """A context manager: inside it, forwards from `address` to `target`, which nobody needs to listen on yet.

    It runs in a thread of its own, because tests block their event loop while processes start.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{target}")
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def reset(self) -> None:
        """Resets every connection; new ones are forwarded."""
        self._call(self._reset)

    def cut(self) -> None:
        """Forwards nothing any more, in either direction, and closes nothing; new connections get no answer."""
        self._call(self._passing.clear)

    def mend(self) -> None:
        """Forwards again, beginning with what was held back."""
        self._call(self._passing.set)

    def _call(self, what: Callable[[], None]) -> None:
        async def run() -> None:
            what()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    async def _open(self) -> None:
        self._passing.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _reset(self) -> None:
        for writer in self._writers:
            wire: socket.socket = writer.get_extra_info("socket")
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        writers = {writer}
        self._writers |= writers
        try:
            await self._passing.wait()
            host, _, port = self._target.rpartition(":")
            there, far = await asyncio.open_connection(host, int(port))
            writers.add(far)
            self._writers |= writers
            ways = [asyncio.create_task(self._forward(*way)) for way in ((reader, far), (there, writer))]
            self._tasks.update(ways)
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            self._tasks.difference_update(ways)
        except OSError:
            pass  # nobody listens: whoever has connected finds the connection closed
        finally:
            self._writers -= writers
            for each in writers:
                each.close()
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            return


def free_address() -> str:
    """An address of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return "{}:{}".format(*probe.getsockname())
