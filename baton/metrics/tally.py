"""Counters and histograms in one array of integers: counting is one addition, reading is done at the scrape. Pure.

The array may be a row of memory that several processes share (`baton.gateway.core.shared_counters`); then every process
reads the sum of all rows.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

from baton.metrics.declared import metrics_of
from baton.metrics.metric import Metric, MetricKind, ProcessRole

_NANO = 1e9
Series = tuple[str, tuple[str, ...]]  # name and label values


class Numbers(Protocol):
    """Integers of at least 64 bits."""

    def __getitem__(self, index: int, /) -> int: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


class Layout:
    """Assigns a cell to each series of a role's counters and histograms.

    A histogram has a cell for each bucket, the last one for infinity, and one for the sum of its values, in billionths
    if its unit is seconds.
    """

    def __init__(self, role: ProcessRole) -> None:
        self._first: dict[Series, int] = {}
        self._metrics = {
            metric.name: metric for metric in metrics_of(role) if metric.kind is not MetricKind.GAUGE and metric.closed
        }
        self.width = 0
        for metric in self._metrics.values():
            for values in product(*(label.values for label in metric.labels)):
                self._first[metric.name, values] = self.width
                self.width += len(metric.bounds) + 2 if metric.kind is MetricKind.HISTOGRAM else 1

    def first(self, name: str, values: tuple[str, ...]) -> int:
        return self._first[name, values]

    def metric(self, name: str) -> Metric:
        return self._metrics[name]

    def series(self) -> Iterator[tuple[Metric, tuple[str, ...], int]]:
        """Every series with its first cell."""
        for (name, values), first in self._first.items():
            yield self._metrics[name], values, first


def scale(metric: Metric) -> float:
    """The number by which a histogram's stored sum is divided."""
    return _NANO if metric.unit == "seconds" else 1.0


class Histogram:
    """One histogram; `observe` costs about half a microsecond."""

    __slots__ = ("_bounds", "_first", "_numbers", "_scale", "_sum")

    def __init__(self, numbers: Numbers, first: int, bounds: Sequence[float], scale: float) -> None:
        self._numbers = numbers
        self._bounds = bounds
        self._first = first
        self._sum = first + len(bounds) + 1
        self._scale = scale

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, or the same value several times."""
        numbers = self._numbers
        numbers[self._first + bisect_left(self._bounds, value)] += times
        numbers[self._sum] += int(value * times * self._scale)


class Counter:
    """One counter."""

    __slots__ = ("_cell", "_numbers")

    def __init__(self, numbers: Numbers, cell: int) -> None:
        self._numbers = numbers
        self._cell = cell

    @property
    def value(self) -> int:
        """What this process has counted."""
        return self._numbers[self._cell]

    def add(self, number: int = 1) -> None:
        self._numbers[self._cell] += number


class Tally:
    """The counters and histograms of one process.

    Args:
        numbers: the array with their cells; None: a new array.
        first: the first cell in `numbers`.
    """

    def __init__(self, layout: Layout, numbers: Numbers | None = None, first: int = 0) -> None:
        self.layout = layout
        self.numbers = [0] * layout.width if numbers is None else numbers
        self._start = first

    def own(self) -> list[int]:
        """A copy of its cells."""
        return [self.numbers[self._start + cell] for cell in range(self.layout.width)]

    def counter(self, name: str, *values: str) -> Counter:
        return Counter(self.numbers, self._start + self.layout.first(name, values))

    def counters(self, name: str) -> dict[str, Counter]:
        """The counters of a metric with one label, by its value."""
        (label,) = self.layout.metric(name).labels
        return {value: self.counter(name, value) for value in label.values}

    def histogram(self, name: str, *values: str) -> Histogram:
        metric = self.layout.metric(name)
        first = self._start + self.layout.first(name, values)
        return Histogram(self.numbers, first, metric.bounds, scale(metric))
