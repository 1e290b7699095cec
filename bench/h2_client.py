"""A cheap gRPC client of one server-streaming method, so that a benchmark measures the server.

It implements only the part of HTTP/2 that one connection with such calls needs: it grants large windows and counts what
arrives.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_WINDOW_BYTES = (1 << 31) - 1
_DEFAULT_WINDOW_BYTES = 65535
_INITIAL_WINDOW_SIZE = 4  # the setting's number
_GRANT_BYTES = 1 << 26
_PREFIX_BYTES = 5

OnMessage = Callable[[bytes], None]


class GrpcConnection(asyncio.Protocol):
    """One connection. `call` starts a stream; its future ends with the stream."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[OnMessage, asyncio.Future[None]]] = {}
        self._pieces: dict[int, bytes] = {}  # of a message that goes on in the next frame
        self._next_stream = 1
        self._data = b""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _WINDOW_BYTES)
        grant = struct.pack(">I", _WINDOW_BYTES - _DEFAULT_WINDOW_BYTES)
        self.transport.write(_PREFACE + _frame(_SETTINGS, settings) + _frame(_WINDOW, grant))

    def call(self, path: str, request: bytes, on_message: OnMessage) -> "asyncio.Future[None]":
        """Starts one call; `on_message` gets each serialized message."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        ended = asyncio.get_running_loop().create_future()
        self._calls[stream] = on_message, ended
        named = (("te", "trailers"), ("content-type", "application/grpc"))
        headers = b"\x83\x86\x04" + _text(path) + b"\x01" + _text("bench")
        headers += b"".join(b"\x00" + _text(name) + _text(value) for name, value in named)
        message = struct.pack(">BI", 0, len(request)) + request
        self.transport.write(
            _frame(_HEADERS, headers, _END_HEADERS, stream) + _frame(_DATA, message, _END_STREAM, stream)
        )
        return ended

    def data_received(self, data: bytes) -> None:
        data = self._data + data
        start, size = 0, len(data)
        while size - start >= 9:
            end = start + 9 + int.from_bytes(data[start : start + 3], "big")
            if end > size:
                break
            stream = int.from_bytes(data[start + 5 : start + 9], "big")
            self._frame_received(data[start + 3], data[start + 4], stream, data[start + 9 : end])
            start = end
        self._data = data[start:]

    def connection_lost(self, exc: Exception | None) -> None:
        for _, ended in self._calls.values():
            ended.set_exception(exc or ConnectionError("the server closed the connection"))

    def _frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._received += len(payload)
            if self._received > _GRANT_BYTES:
                self.transport.write(_frame(_WINDOW, struct.pack(">I", self._received)))
                self._received = 0
            self._messages_received(stream, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self.transport.write(_frame(_SETTINGS, b"", _ACK))
        elif kind == _PING and not flags & _ACK:
            self.transport.write(_frame(_PING, payload, _ACK))
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            _, ended = self._calls.pop(stream)
            ended.set_result(None)

    def _messages_received(self, stream: int, payload: bytes) -> None:
        data = self._pieces.pop(stream, b"") + payload
        on_message, _ = self._calls[stream]
        while len(data) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(data[1:_PREFIX_BYTES], "big")
            if end > len(data):
                break
            on_message(data[_PREFIX_BYTES:end])
            data = data[end:]
        if data:
            self._pieces[stream] = data


def _frame(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    """An HPACK string without compression, shorter than 127 bytes."""
    return bytes((len(text),)) + text.encode()
