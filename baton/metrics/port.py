"""The port of metrics: a plain HTTP server that answers `GET /metrics` and nothing else.

Its callers are not authenticated, so it reads one short head per connection, within a few seconds, and answers a few at
a time.
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
    """Serves the page during the `async with` block.

    Args:
        bound: socket from `baton.rpc.sockets.bind`; None: nothing is served.
        page: makes the page.
    """

    def __init__(self, bound: socket.socket | None, page: Page) -> None:
        self._bound = bound
        self._page = page
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str | None:
        """The page's URL. Returns None if nothing is served."""
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
            pass  # the request has no end, or the client has left

    async def _answer(self, head: bytes) -> bytes:
        line, *fields = head.split(b"\r\n")
        method, _, rest = line.partition(b" ")
        target, _, version = rest.partition(b" ")
        path, _, query = target.partition(b"?")
        hosts = sum(field.lower().startswith(b"host:") for field in fields)
        if hosts > 1 or (not hosts and version == b"HTTP/1.1"):  # RFC 9112, section 3.2
            answer = _response("400 Bad Request", b"send one header Host\n")
        elif path != b"/metrics":
            answer = _response("404 Not Found", b"this port has /metrics only\n")
        elif method not in (b"GET", b"HEAD"):
            answer = _response("405 Method Not Allowed", b"GET it\n", fields="Allow: GET, HEAD\r\n")
        else:
            page = await self._page(names_of(query.decode(errors="replace")))
            answer = _response("200 OK", page, content_type=CONTENT_TYPE)
        return answer if method != b"HEAD" else answer[: answer.index(b"\r\n\r\n") + 4]


def _response(status: str, body: bytes, *, content_type: str = "text/plain; charset=utf-8", fields: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{fields}"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
