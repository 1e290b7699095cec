"""Polls, with a deadline, for conditions that have no event."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Waits until the condition holds. Returns False if it did not within the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(0.02)
    return True
