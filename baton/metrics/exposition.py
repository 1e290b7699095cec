"""Formats declared metrics for Prometheus: current values become families of prometheus_client, and these become text.

The text is made one family at a time, so that a caller on an event loop can let others run between two.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from baton.core.errors import shortened
from baton.core.version import __version__
from baton.metrics import metric as metrics
from baton.metrics.declared import BASE_LABELS, SERVED_MODEL, metrics_of
from baton.metrics.metric import MetricKind, ProcessRole
from baton.metrics.tally import Layout, Series, scale

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABEL_CHARACTERS_MAX = 200


class Figure(NamedTuple):
    """The current value of one series that the tally does not count: a gauge, or a counter kept elsewhere."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class Exposition:
    """The metrics of one process.

    Args:
        process: whether to add memory, CPU time and open files of this process, under prometheus_client's names.
    """

    def __init__(self, role: ProcessRole, layout: Layout, model_name: str, *, process: bool = True) -> None:
        self._metrics = metrics_of(role)
        self._layout = layout
        self._base = [role.value, shortened(model_name, _LABEL_CHARACTERS_MAX)]
        self._process = CollectorRegistry() if process else None
        ProcessCollector(registry=self._process)

    def pages(
        self, totals: Sequence[int], figures: Iterable[Figure], names: frozenset[str] = frozenset()
    ) -> Iterator[bytes]:
        """Yields the text, family by family.

        Args:
            totals: the cells of the layout.
            figures: current values; they replace the cells of the same series.
            names: the metrics that are wanted; none: all.
        """
        values: dict[str, dict[tuple[str, ...], float]] = {}
        for metric, labels, first in self._layout.series():
            if metric.kind is MetricKind.COUNTER and (not names or metric.name in names):
                values.setdefault(metric.name, {})[labels] = totals[first]
        build = Figure("baton_build_info", 1, (__version__, platform.python_version()))
        for name, value, labels in (build, *figures):
            values.setdefault(name, {})[tuple(shortened(each, _LABEL_CHARACTERS_MAX) for each in labels)] = value
        for metric in self._metrics:
            if names and metric.name not in names:
                continue
            if metric.kind is MetricKind.HISTOGRAM:
                yield _text(self._histogram(metric, totals))
            else:
                yield _text(self._plain(metric, values.get(metric.name, {})))
        if self._process is not None and not names:
            yield generate_latest(self._process)

    def _plain(self, metric: metrics.Metric, values: Mapping[tuple[str, ...], float]) -> Metric:
        family_of = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
        family = family_of(metric.name, metric.meaning, labels=self._names(metric))
        for labels, value in values.items():
            family.add_metric([*self._base, *labels], value)
        return family

    def _histogram(self, metric: metrics.Metric, totals: Sequence[int]) -> Metric:
        family = HistogramMetricFamily(metric.name, metric.meaning, labels=self._names(metric))
        bounds = [*(str(bound) for bound in metric.bounds), "+Inf"]
        for labels, first in self._series(metric.name):
            stop = first + len(bounds)
            buckets = list(zip(bounds, map(float, accumulate(totals[first:stop])), strict=True))
            named = [self._base[-1] if label == SERVED_MODEL else label for label in labels]
            family.add_metric([*self._base, *named], buckets, totals[stop] / scale(metric))
        return family

    def _series(self, name: str) -> Iterator[tuple[tuple[str, ...], int]]:
        return ((labels, first) for metric, labels, first in self._layout.series() if metric.name == name)

    @staticmethod
    def _names(metric: metrics.Metric) -> list[str]:
        return [*BASE_LABELS, *(label.name for label in metric.labels)]


class _One(Collector):
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _text(family: Metric) -> bytes:
    return generate_latest(_One(family))


def by_series(figures: Iterable[Figure]) -> dict[Series, float]:
    """The figures by series, for tests and checks."""
    return {(figure.name, figure.labels): figure.value for figure in figures}
