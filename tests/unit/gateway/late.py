"""Lets time pass at a known point of a test, so that no slow machine makes it pass before."""

import asyncio

import pytest

from baton.gateway.request import driver

# With these settings no pause of the test's process loses a node.
PATIENT = {"keepalive_s": 60.0, "prefill_stall_s": 60.0, "decode_stall_s": 60.0}
# A request's limit that passes at once with `let_limit_pass`. Nodes may be silent for longer.
LIMIT_S = 20.0


def let_limit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves the clock of the running loop and that of requests forward by `LIMIT_S`. The loop's stays there: if it went
    back, what was timed by it meanwhile would come that much later, such as the end of the server."""
    loop = asyncio.get_running_loop()
    time = loop.time

    def later() -> float:
        return time() + LIMIT_S

    loop.time = later  # type: ignore[method-assign]
    monkeypatch.setattr(driver, "monotonic", later)
