"""Messages between the processes of one node: bytes behind their length, over a socket that both were born with.

One end blocks, the other one may live on an event loop. When a process ends, however it ends, its peer reads the end of
the file. Most messages are pickles, which are safe here: nobody else has these sockets.
"""

import asyncio
import pickle
import socket
import struct
from typing import Any, Self

_LENGTH = struct.Struct("<Q")


class Channel:
    """An end for threads: one may send while another one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """The end that this process was started with."""
        return cls(socket.socket(fileno=descriptor))

    def send(self, message: object) -> None:
        """Raises OSError: the other one is gone."""
        self.send_bytes(_pickled(message))

    def send_bytes(self, message: bytes) -> None:
        """Raises OSError: the other one is gone."""
        self._end.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> Any:
        """Raises EOFError: the other one is gone."""
        return pickle.loads(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Raises EOFError: the other one is gone."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def detach(self) -> socket.socket:
        """The socket, for an `AsyncChannel`."""
        return self._end

    def close(self) -> None:
        self._end.close()

    def _take(self, length: int) -> bytes:
        taken = bytearray(length)
        view = memoryview(taken)
        while view:
            try:
                count = self._end.recv_into(view)
            except ConnectionError:
                count = 0
            if count == 0:
                raise EOFError("the other end is closed")
            view = view[count:]
        return bytes(taken)


class AsyncChannel:
    """An end for an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, channel: Channel) -> Self:
        """Takes a channel's socket over."""
        return cls(*await asyncio.open_unix_connection(sock=channel.detach()))

    def send(self, message: object) -> None:
        """Queues a message; nothing is sent once the other one is gone."""
        data = _pickled(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        """Raises EOFError: the other one is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError("the other end is closed") from None

    async def flush(self) -> None:
        """Returns when little enough is queued; at once if the other one is gone."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return

    async def close(self) -> None:
        """Sends what is queued first."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return


def _pickled(message: object) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
