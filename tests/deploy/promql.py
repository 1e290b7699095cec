"""What is wrong in a PromQL expression: metrics, labels and label values that no process of Baton has. Pure.

It reads selectors, `by` clauses and the suffixes of histograms; promtool checks the grammar.
"""

import re
from collections.abc import Iterator, Mapping, Set

from baton.metrics.declared import BASE_LABELS, METRICS
from baton.metrics.metric import Label, Metric, MetricKind, ProcessRole

# Prometheus adds them to every series that it scrapes.
SCRAPED_LABELS = frozenset({"instance", "job"})
# Of prometheus_client.
PROCESS_METRICS = frozenset({"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"})

_SELECTOR = re.compile(r"\b((?:baton|process)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\bby\s*\(([^)]*)\)")

_DECLARED = {metric.name: metric for metric in METRICS}
_SUFFIXES = ("_bucket", "_sum", "_count")


def faults(expression: str, recorded: Mapping[str, Set[str]]) -> list[str]:
    """One line for each fault.

    Args:
        recorded: the labels of each recorded series, by its name.
    """
    return list(_faults(expression, recorded))


def labels(expression: str, recorded: Mapping[str, Set[str]]) -> frozenset[str]:
    """The labels of the expression's result: those of its outermost `by`, else those of its series."""
    clauses = _BY.findall(expression)
    if clauses:
        return frozenset(name.strip() for name in clauses[0].split(",")) - {"le"}
    return _labels_of_series(expression, recorded) - {"le"}


def _faults(expression: str, recorded: Mapping[str, Set[str]]) -> Iterator[str]:
    selectors = _SELECTOR.findall(expression)
    if not selectors:
        yield f"{expression} has no metric of Baton"
    for name, matchers in selectors:
        found = _labels_of(name, recorded)
        if found is None:
            yield f"{name} is not declared"
            continue
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in found:
                yield f"{name} has no label {label}"
            elif operator in ("=", "!="):
                yield from _unknown_values(name, label, [value])
            elif "$" not in value:
                yield from _unknown_values(name, label, value.split("|"))
    known = _labels_of_series(expression, recorded)
    for clause in _BY.findall(expression):
        for label in clause.split(","):
            if label.strip() not in known:
                yield f"no series of {expression} has the label {label.strip()}"


def _labels_of_series(expression: str, recorded: Mapping[str, Set[str]]) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for name, _ in _SELECTOR.findall(expression):
        found |= _labels_of(name, recorded) or frozenset()
    return found


def _labels_of(name: str, recorded: Mapping[str, Set[str]]) -> frozenset[str] | None:
    """None: there is no such series."""
    if name in recorded:
        return frozenset(recorded[name])
    if name in PROCESS_METRICS:
        return SCRAPED_LABELS
    metric = _metric(name)
    if metric is None:
        return None
    own = {label.name for label in metric.labels} | ({"le"} if name.endswith("_bucket") else set())
    return SCRAPED_LABELS | set(BASE_LABELS) | own


def _metric(name: str) -> Metric | None:
    metric = _DECLARED.get(name)
    if metric is not None:
        return None if metric.kind is MetricKind.HISTOGRAM else metric
    for suffix in _SUFFIXES:
        metric = _DECLARED.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if metric is not None and metric.kind is MetricKind.HISTOGRAM:
            return metric
    return None


def _unknown_values(name: str, label: str, values: list[str]) -> Iterator[str]:
    metric = _metric(name)
    if metric is None:
        return
    closed = (*metric.labels, Label("role", "", tuple(ProcessRole(role) for role in metric.roles)))
    for each in closed:
        if each.name == label and each.values:
            yield from (f"{name} has no {label} {value!r}" for value in values if value not in each.values)
