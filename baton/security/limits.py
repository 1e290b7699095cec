"""Limits of one client: requests and tokens per minute, as token buckets, and concurrent requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.core.errors import InvalidRequest, Overloaded
from baton.security.limit_table import REQUESTS, TOKENS, LimitCells, LimitTable

_BUSY_RETRY_S = 1.0
_MINUTE_NS = 60_000_000_000
_FILL_NS_MAX = 1 << 60  # of one request; 36 years
_FULL_AT_NS_MAX = 1 << 62


@dataclass(frozen=True)
class Limits:
    """A client's limits; None means no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrent: int | None = None


class _Bucket:
    """A token bucket of one minute's allowance. Its level may fall below 0, because costs are known only afterwards.

    Its state is one number: the time at which it is full again. So processes can share it.
    """

    def __init__(self, per_minute: float, which: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._which = which
        self._clock = clock

    def wait_s(self, cells: LimitCells, wanted: float) -> float:
        """Returns the seconds until the bucket holds that much or is full."""
        missing_ns = max(0, cells.full_at_ns(self._which) - self._now_ns())
        return max(0, missing_ns - _MINUTE_NS + self._fill_ns(min(wanted, self._per_minute))) / 1e9

    def take(self, cells: LimitCells, amount: float) -> None:
        full_at_ns = cells.full_at_ns(self._which)
        if amount > 0:
            full_at_ns = max(full_at_ns, self._now_ns())
        cells.set_full_at_ns(self._which, min(_FULL_AT_NS_MAX, full_at_ns + self._fill_ns(amount)))

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _fill_ns(self, amount: float) -> int:
        """How long the bucket takes to gain that much; rounded down, so that a full bucket always suffices."""
        return int(max(-_FILL_NS_MAX, min(_FILL_NS_MAX, amount * _MINUTE_NS / self._per_minute)))


class LimitedPrompt:
    """The charge for one request's prompt: an estimate, until the prompt is tokenized."""

    def __init__(self, bucket: _Bucket | None, cells: LimitCells, held: int) -> None:
        self._bucket = bucket
        self._cells = cells
        self._held = held
        if bucket is not None:
            bucket.take(cells, held)

    def has(self, tokens: int) -> None:
        """Replaces the estimate by the prompt's real number of tokens."""
        self.release()
        if self._bucket is not None:
            self._bucket.take(self._cells, tokens)

    def release(self) -> None:
        """Returns the estimate to the bucket."""
        if self._bucket is not None:
            self._bucket.take(self._cells, -self._held)
        self._held = 0


class Budget:
    """What is left of one client's limits.

    Args:
        table: where all processes of the gateway count what the client uses; None: it counts in this process only.
    """

    def __init__(
        self,
        limits: Limits,
        name: str = "",
        *,
        table: LimitTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._name = name
        self._clock = clock
        self._table = table
        self._own = LimitCells()
        self._requests = _bucket(limits.requests_per_minute, REQUESTS, clock)
        self._tokens = _bucket(limits.tokens_per_minute, TOKENS, clock)

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
        limits, most, cells = self.limits, self.limits.concurrent, self._cells()
        if most is not None and outputs > most:
            allowed = (f"1 to {most}",)
            raise InvalidRequest(
                f"{outputs} outputs count as {outputs} requests at once", field="n", value=outputs, allowed=allowed
            )
        if most is not None and cells.running + outputs > most:
            raise self._over(f"{most} requests at once", _BUSY_RETRY_S)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(cells, max(1, tokens))) > 0:
            raise self._over(f"{limits.tokens_per_minute:g} tokens per minute", wait_s)
        if self._requests is not None and is_new:
            if (wait_s := self._requests.wait_s(cells, outputs)) > 0:
                raise self._over(f"{limits.requests_per_minute:g} requests per minute", wait_s)
            self._requests.take(cells, outputs)
        prompt = LimitedPrompt(self._tokens, cells, tokens)
        cells.add_running(outputs)
        try:
            yield prompt
        finally:
            prompt.release()
            cells.add_running(-outputs)

    def spend(self, tokens: int) -> None:
        """Charges tokens of an output."""
        if self._tokens is not None:
            self._tokens.take(self._cells(), tokens)

    def _cells(self) -> LimitCells:
        """The client's numbers. NOTE: found anew for each request, because an idle client's entry may go to another."""
        if self._table is None or self.limits == Limits():
            return self._own
        return self._table.cells(self._name, int(self._clock() * 1e9)) or self._own

    def _over(self, limit: str, wait_s: float) -> Overloaded:
        cure = "try again later, or ask the operator for a higher limit"
        return Overloaded(f"{self._name} is at its limit of {limit}", cure=cure, retry_after_s=wait_s)


def _bucket(per_minute: float | None, which: int, clock: Callable[[], float]) -> _Bucket | None:
    return None if per_minute is None else _Bucket(per_minute, which, clock)


UNLIMITED = Budget(Limits())
