"""Makes the page of metrics on an event loop, in pieces, so that other work goes on between two."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import parse_qs

Page = Callable[[frozenset[str]], Awaitable[bytes]]
"""The page with these metrics; none: with all."""

_NAMES_MAX = 64


def names_of(query: str) -> frozenset[str]:
    """The metrics that a query names by `name[]=`, as in prometheus_client; none: all."""
    try:
        return frozenset(parse_qs(query, max_num_fields=_NAMES_MAX).get("name[]", ()))
    except ValueError:  # too many
        return frozenset()


async def join(pieces: Iterable[bytes]) -> bytes:
    made = []
    for piece in pieces:
        made.append(piece)
        await asyncio.sleep(0)
    return b"".join(made)
