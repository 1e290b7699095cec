"""Measures how busy each process of a gateway is, and estimates how many tokens one could send a second.

A process's event loop sends every token. While it is busy all the time, tokens wait for it and are merged into fewer
messages, which cost less. A client with few connections may keep one process busy while others are idle.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from baton.gateway.core.shared_counters import Count, SharedCounters

WINDOW_STEPS = 5  # steps that a figure covers
_TOKENS = "baton_generation_tokens_total"
_BUSY_MIN = 0.05  # a process that is less busy spends its time on other things than tokens


@dataclass(frozen=True)
class WorkerLoad:
    """One process in the last seconds.

    Attributes:
        busy_share: share of the time in which its event loop worked, from 0 to 1.
    """

    busy_share: float
    tokens_per_s: int

    @property
    def limit_tokens_per_s(self) -> int | None:
        """Estimate of the tokens that it can send a second with such requests, to two digits; None: it has too little
        work."""
        if self.busy_share < _BUSY_MIN or not self.tokens_per_s:
            return None
        return int(float(f"{self.tokens_per_s / self.busy_share:.1e}"))


class _Reading(NamedTuple):
    at_s: float
    loop_s: float
    tokens: int


class LoadMeter:
    """Measures this process, for all processes to read. `read` must be called on the event loop, in equal steps.

    Args:
        clock, loop_clock: the time, and the CPU time of the current thread.
    """

    def __init__(
        self,
        counters: SharedCounters,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._loop_clock = clock, loop_clock
        self._counters = counters
        self._cell = counters.layout.first(_TOKENS, ())
        self._readings: deque[_Reading] = deque(maxlen=WINDOW_STEPS + 1)

    def read(self) -> None:
        now = _Reading(self._clock(), self._loop_clock(), self._counters.own_cell(self._cell))
        self._readings.append(now)
        before = self._readings[0]
        passed_s = now.at_s - before.at_s
        if passed_s > 0:
            busy_share = min(1.0, (now.loop_s - before.loop_s) / passed_s)
            self._counters.set(Count.BUSY, round(1000 * busy_share))
            self._counters.set(Count.TOKENS, round((now.tokens - before.tokens) / passed_s))


def worker_loads(counters: SharedCounters) -> list[WorkerLoad]:
    """The loads of all processes, as each has measured itself last."""
    rows = zip(counters.of_each(Count.BUSY), counters.of_each(Count.TOKENS), strict=True)
    return [WorkerLoad(busy / 1000, tokens) for busy, tokens in rows]
