"""TTFT and inter-token latency over the last minutes, from the histograms that all processes of a gateway share.

A point is the difference of two readings of the metrics. So it costs nothing per token, and its percentiles are as
exact as the buckets of the histograms.
"""

import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from baton.gateway.core.shared_counters import SharedCounters

STEP_S = 2.0
WINDOW_STEPS = 5  # steps that one point covers
POINTS = 300

_NAMES = ("baton_time_to_first_token_seconds", "baton_inter_token_latency_seconds")
_TOKENS = "baton_generation_tokens_total"


class LatencyReading(NamedTuple):
    """The cells of both histograms, and the number of generated tokens, at `at_s`."""

    at_s: float
    cells: tuple[tuple[int, ...], ...]
    tokens: int


class Point(NamedTuple):
    """One point of the charts.

    Attributes:
        at_s: unix time.
        values: p50 and p99 of TTFT, p50 and p99 of inter-token latency, in seconds; None: no samples in the window.
        tokens_per_s: rate of tokens sent to clients.
    """

    at_s: float
    values: tuple[float | None, ...]
    tokens_per_s: float


class Latencies:
    """Points of the charts. The owner calls `read` every `STEP_S`."""

    def __init__(self, counters: SharedCounters) -> None:
        self._counters = counters
        metrics = [counters.layout.metric(name) for name in _NAMES]
        self._bounds = [metric.bounds for metric in metrics]
        self._firsts = [counters.layout.first(name, ()) for name in _NAMES]
        self._tokens = counters.layout.first(_TOKENS, ())
        self._readings: deque[LatencyReading] = deque(maxlen=WINDOW_STEPS + 1)
        self.points: deque[Point] = deque(maxlen=POINTS)

    def read(self) -> None:
        """Reads the shared counters and adds a point."""
        totals = self._counters.totals()
        cells = tuple(
            tuple(totals[first : first + len(bounds) + 1])
            for first, bounds in zip(self._firsts, self._bounds, strict=True)
        )
        now = LatencyReading(time.time(), cells, totals[self._tokens])
        self._readings.append(now)
        before = self._readings[0]
        values: list[float | None] = []
        for bounds, new, old in zip(self._bounds, now.cells, before.cells, strict=True):
            counts = [after - earlier for after, earlier in zip(new, old, strict=True)]
            values += (quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99))
        passed_s = now.at_s - before.at_s
        rate = max(0.0, (now.tokens - before.tokens) / passed_s) if passed_s > 0 else 0.0
        self.points.append(Point(now.at_s, tuple(values), rate))


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimates a quantile from a histogram, like Prometheus' `histogram_quantile`.

    Returns None if nothing was counted, and the last bound if the quantile is above it.

    Args:
        bounds: upper bounds of the buckets, ascending, without infinity.
        counts: count of each bucket, then of the bucket up to infinity.
        share: the quantile, from 0 to 1.
    """
    sums = list(accumulate(counts))
    total = sums[-1]
    if total <= 0:
        return None
    rank = share * total
    for index, bound in enumerate(bounds):
        if sums[index] >= rank:
            lower = bounds[index - 1] if index else 0.0
            below = sums[index - 1] if index else 0
            return lower + (bound - lower) * (rank - below) / counts[index] if counts[index] else bound
    return bounds[-1]
