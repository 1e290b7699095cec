"""HTTP/1.1 for many streams at little cost: connections that are kept, requests as bytes, bodies as callbacks.

It exists because a load client spends its time on chunks. httptools' parser calls `on_body` from the socket's own
callback, so a chunk costs no task switch; docs/benchmarking.md has the measured cost per token next to that of common
clients.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from baton.core.errors import InvalidRequest
from baton.load.answer import AskError
from baton.settings.environment import client_access


@dataclass(frozen=True)
class Origin:
    """The server that requests go to. `path` comes before the endpoint's own, without a slash at its end."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parses an address with or without /v1.

        Raises:
            InvalidRequest: it is not an address.
        """
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if parts.scheme not in ("http", "https") or not host:
            raise InvalidRequest(
                f"{url!r} is no HTTP address", field="target", value=url, cure="give one such as http://127.0.0.1:8000"
            )
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if tls else 80), path, tls)


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self) -> None:
        self.status = 0
        self.reused = False
        self.keeps = False  # usable for another request
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._on_body: Callable[[bytes, int], None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._failure: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.keeps = False
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The parser wraps what the callback raised.
            self._end(self._failure or AskError("BadAnswer", f"no HTTP answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.keeps = False
        # An answer without length ends with its connection.
        self._end(AskError("BrokenStream", f"the connection broke: {exc or 'closed by the server'}"))

    def send(self, request: bytes, on_body: Callable[[bytes, int], None]) -> asyncio.Future[None]:
        """Sends a request; the future completes at the end of the answer."""
        assert self._transport is not None
        self.status, self.keeps, self._failure = 0, False, None
        self._parser, self._on_body = httptools.HttpResponseParser(self), on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    # ---- callbacks of the parser

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._on_body is not None
        try:
            self._on_body(body, self.status)
        except Exception as error:
            self._failure = error
            raise

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.keeps = self._parser.should_keep_alive()
        self._end(None)

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        self.keeps = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, error: Exception | None) -> None:
        done, self._done, self._parser = self._done, None, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


@dataclass
class HttpStreams:
    """Connections to one origin, opened as needed and kept."""

    origin: Origin
    headers: Mapping[str, str] = field(default_factory=dict)
    _idle: list[_Connection] = field(default_factory=list)
    _tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        if self.origin.tls:
            ca = client_access().tls_ca
            self._tls = ssl.create_default_context(cafile=None if ca == "system" else ca)

    def request(self, method: str, endpoint: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a request."""
        origin = self.origin
        lines = {
            "host": f"{origin.host}:{origin.port}",
            "content-length": str(len(body)),
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            **self.headers,
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"{method} {origin.path}{endpoint} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def send(self, request: bytes, on_body: Callable[[bytes, int], None]) -> int:
        """Sends a request; calls `on_body` with parts of the body and the status; returns the status at the end.

        Raises:
            AskError: no connection, or it broke.
        """
        while True:
            connection = await self._connect()
            try:
                await connection.send(request, on_body)
            except AskError:
                # The server may close a kept connection at the moment when a request is sent on it.
                if connection.reused and connection.status == 0:
                    continue
                raise
            finally:
                if connection.keeps:
                    connection.reused = True
                    self._idle.append(connection)
                else:
                    connection.close()
            return connection.status

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        origin = self.origin
        try:
            _, opened = await asyncio.get_running_loop().create_connection(
                _Connection, origin.host, origin.port, ssl=self._tls
            )
        except OSError as error:
            raise AskError("NoConnection", f"cannot reach {origin.host}:{origin.port}: {error}") from None
        return opened

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
