"""The port of metrics: a plain HTTP server that answers `GET /metrics` and nothing else.

Whoever reaches it is nobody: it reads one short head per connection, within a few seconds, and answers a few at a time.
"""

import asyncio
import socket
from types import TracebackType
from typing import Self

from baton.metrics.exposition import CONTENT_TYPE
from baton.metrics.page import Page, names_of
from baton.rpc.sockets import address_of

_HEAD_BYTES_MAX = 8192
_TIMEOUT_S = 5.0
_CONNECTIONS_MAX = 16


class MetricsPort:
    """Serves during the `async with` block.

    Args:
        bound: of `baton.rpc.sockets.bind`; None: nothing is served.
        page: makes the page.
    """

    def __init__(self, bound: socket.socket | None, page: Page) -> None:
        self._bound = bound
        self._page = page
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str | None:
        """None: nothing is served."""
        return None if self._bound is None else f"http://{address_of(self._bound)}/metrics"

    async def __aenter__(self) -> Self:
        if self._bound is not None:
            self._server = await asyncio.start_server(self._accept, sock=self._bound, limit=_HEAD_BYTES_MAX)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is None:
            return
        self._server.close()
        for each in list(self._open):
            each.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics")
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        # NOTE: a task that is cancelled before its first step runs nothing, not even a `finally`.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it asked nothing that has an answer, or has left

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path, _, query = rest.partition(b" ")[0].partition(b"?")
        if path != b"/metrics":
            return _response("404 Not Found", b"this port has /metrics only\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"GET it\n")
        response = _response("200 OK", await self._page(names_of(query.decode(errors="replace"))), CONTENT_TYPE)
        return response if method == b"GET" else response[: response.index(b"\r\n\r\n") + 4]


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
