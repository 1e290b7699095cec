"""Limits of one client: requests and tokens per minute as token buckets, and requests at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import Overloaded

_BUSY_RETRY_S = 1.0


@dataclass(frozen=True)
class Limits:
    """None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None


class _Bucket:
    """Holds what a minute allows, and fills up at that pace. It may owe: what a request costs is known at its end."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._at_s = clock()

    def wait_s(self, wanted: float) -> float:
        """How long until it holds that much, or is full."""
        now_s = self._clock()
        self._level = min(self._per_minute, self._level + (now_s - self._at_s) * self._per_minute / 60)
        self._at_s = now_s
        return max(0.0, (min(wanted, self._per_minute) - self._level) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class Budget:
    """What is left to one client in this process."""

    def __init__(self, limits: Limits, name: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._name = name
        self._running = 0
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request of the client, until the block ends.

        Raises:
            Overloaded: it is over a limit; with the time after which to try again.
        """
        limits = self.limits
        if limits.concurrent is not None and self._running >= limits.concurrent:
            raise self._over(f"{limits.concurrent} requests at once", _BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1)) > 0:
            raise self._over(f"{limits.tokens_per_minute:g} tokens per minute", wait_s)
        if self._requests is not None:
            if (wait_s := self._requests.wait_s(1)) > 0:
                raise self._over(f"{limits.requests_per_minute:g} requests per minute", wait_s)
            self._requests.take(1)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def spend(self, tokens: int) -> None:
        """Counts tokens of a prompt or of an output."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _over(self, limit: str, wait_s: float) -> Overloaded:
        cure = "try again later, or ask the operator for more"
        return Overloaded(f"{self._name} is at its limit of {limit}", cure=cure, retry_after_s=wait_s)


def _bucket(per_minute: float | None, clock: Callable[[], float]) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, clock)


UNLIMITED = Budget(Limits())
