"""The page of metrics on an event loop: made in pieces, so that other work goes on between two."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

Page = Callable[[], Awaitable[bytes]]


async def join(pieces: Iterable[bytes]) -> bytes:
    made = []
    for piece in pieces:
        made.append(piece)
        await asyncio.sleep(0)
    return b"".join(made)
