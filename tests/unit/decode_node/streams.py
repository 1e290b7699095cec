"""A bidirectional stream without gRPC; the test reads and writes one side of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

from baton.node import waiting

Request = TypeVar("Request")
Response = TypeVar("Response")

DEADLINE_S = 120.0


class Stream(Generic[Request, Response]):
    """`incoming` and `write` are the service's side; `send`, `receive` and `end` are the peer's."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        self._responses: asyncio.Queue[Response] = asyncio.Queue()
        self.incoming = self._incoming()

    async def _incoming(self) -> AsyncIterator[Request]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def write(self, response: Response) -> None:
        self._responses.put_nowait(response)

    def send(self, *requests: Request) -> None:
        for request in requests:
            self._requests.put_nowait(request)

    def end(self) -> None:
        self._requests.put_nowait(None)

    async def receive(self) -> Response:
        async with asyncio.timeout(DEADLINE_S):
            return await self._responses.get()

    def received(self) -> list[Response]:
        """All messages that were written and not yet received."""
        return [self._responses.get_nowait() for _ in range(self._responses.qsize())]


async def until(condition: Callable[[], bool]) -> None:
    """Polls until a condition holds that nothing signals."""
    assert await waiting.until(condition, timeout_s=DEADLINE_S)
