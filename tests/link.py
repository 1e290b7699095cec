"""A TCP address that forwards to another one, and can be cut, reset, slow, late, or silent in one direction.

A silent link keeps its connections open and forwards what it kept back when it is healed, as a network does that loses
packets for a while.
"""

import asyncio
import socket
import struct
from contextlib import suppress
from types import TracebackType
from typing import Self

from tests.tcp_server import close_server

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Link:
    """One link of the network. An async context manager: inside it, it forwards.

    Args:
        name: for people.
        target: host:port to forward to.
    """

    def __init__(self, name: str, target: str) -> None:
        self.name = name
        self.address = ""
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self._target = target
        self._refuses = False
        # What is open forwards: from the caller to the target, and back.
        self._gates = {"there": asyncio.Event(), "back": asyncio.Event()}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.heal()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        await close_server(self._server)
        self.reset()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # ---- faults

    def cut(self) -> None:
        """Resets all connections, and each new one until it is healed."""
        self._refuses = True
        self.reset()

    def reset(self) -> None:
        for writer in tuple(self._writers):
            _abort(writer)

    def silence(self, direction: str) -> None:
        """Stops forwarding "there", "back" or "both"."""
        for name, gate in self._gates.items():
            if direction in (name, "both"):
                gate.clear()

    def heal(self) -> None:
        self._refuses = False
        self.delay_s, self.bytes_per_s = 0.0, None
        for gate in self._gates.values():
            gate.set()

    # ---- forwarding

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of its own: that of a coroutine handler logs its cancellation as an error.
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer), name=f"link-{self.name}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not self._refuses:
                await self._forward(reader, writer)
        finally:
            self._writers.discard(writer)
            _abort(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        try:
            from_target, to_target = await asyncio.open_connection(host, int(port))
        except OSError:
            return
        self._writers.add(to_target)
        ways = [
            asyncio.create_task(self._pump(reader, to_target, self._gates["there"])),
            asyncio.create_task(self._pump(from_target, writer, self._gates["back"])),
        ]
        try:
            # The end of one direction ends both: no side of gRPC closes only one.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._writers.discard(to_target)
            _abort(to_target)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await gate.wait()
                if pause_s := self._pause_s(len(piece)):
                    await asyncio.sleep(pause_s)
                writer.write(piece)
                await writer.drain()

    def _pause_s(self, num_bytes: int) -> float:
        return self.delay_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def _abort(writer: asyncio.StreamWriter) -> None:
    """Closes the connection with a reset."""
    if writer.transport.is_closing():
        return
    found = writer.get_extra_info("socket")
    if found is not None:
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
