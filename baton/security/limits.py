"""Limits of one client: requests and tokens per minute, as token buckets, and concurrent requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.errors import InvalidRequest, Overloaded

_BUSY_RETRY_S = 1.0


@dataclass(frozen=True)
class Limits:
    """A client's limits; None means no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None


class _Bucket:
    """A token bucket of one minute's allowance. Its level may fall below 0, because costs are known only afterwards."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._level = per_minute
        self._at_s = clock()

    def wait_s(self, wanted: float) -> float:
        """Returns the seconds until the bucket holds that much or is full."""
        now_s = self._clock()
        self._level = min(self._per_minute, self._level + (now_s - self._at_s) * self._per_minute / 60)
        self._at_s = now_s
        return max(0.0, (min(wanted, self._per_minute) - self._level) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        self._level -= amount


class LimitedPrompt:
    """The charge for one request's prompt: an estimate, until the prompt is tokenized."""

    def __init__(self, bucket: _Bucket | None, held: int) -> None:
        self._bucket = bucket
        self._held = held
        if bucket is not None:
            bucket.take(held)

    def has(self, tokens: int) -> None:
        """Replaces the estimate by the prompt's real number of tokens."""
        self.release()
        if self._bucket is not None:
            self._bucket.take(tokens)

    def release(self) -> None:
        """Returns the estimate to the bucket."""
        if self._bucket is not None:
            self._bucket.take(-self._held)
        self._held = 0


class Budget:
    """What is left of one client's limits in this process."""

    def __init__(self, limits: Limits, name: str = "", *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._name = name
        self._running = 0
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)

    @contextmanager
    def request(self, *, outputs: int = 1, tokens: int = 0, is_new: bool = True) -> Iterator[LimitedPrompt]:
        """Counts a request of the client until the block ends.

        Args:
            outputs: number of outputs; each counts as a request.
            tokens: estimate of the prompt's tokens, charged until the prompt is tokenized.
            is_new: False if this call only prepares a request that is counted later.

        Raises:
            Overloaded: the client is at a limit; `retry_after_s` says when to try again.
            InvalidRequest: the request has more outputs than the client may run concurrently.
        """
        limits, most = self.limits, self.limits.concurrent
        if most is not None and outputs > most:
            allowed = (f"1 to {most}",)
            raise InvalidRequest(
                f"{outputs} outputs count as {outputs} requests at once", field="n", value=outputs, allowed=allowed
            )
        if most is not None and self._running + outputs > most:
            raise self._over(f"{most} requests at once", _BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(max(1, tokens))) > 0:
            raise self._over(f"{limits.tokens_per_minute:g} tokens per minute", wait_s)
        if self._requests is not None and is_new:
            if (wait_s := self._requests.wait_s(outputs)) > 0:
                raise self._over(f"{limits.requests_per_minute:g} requests per minute", wait_s)
            self._requests.take(outputs)
        prompt = LimitedPrompt(self._tokens, tokens)
        self._running += outputs
        try:
            yield prompt
        finally:
            prompt.release()
            self._running -= outputs

    def spend(self, tokens: int) -> None:
        """Charges tokens of an output."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _over(self, limit: str, wait_s: float) -> Overloaded:
        cure = "try again later, or ask the operator for a higher limit"
        return Overloaded(f"{self._name} is at its limit of {limit}", cure=cure, retry_after_s=wait_s)


def _bucket(per_minute: float | None, clock: Callable[[], float]) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, clock)


UNLIMITED = Budget(Limits())
