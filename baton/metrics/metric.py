"""What a metric is: its kind, its labels, and the processes that export it. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from math import prod


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class ProcessRole(StrEnum):
    """The process that exports a metric."""

    GATEWAY = "gateway"
    PREFILL = "prefill"
    DECODE = "decode"
    PICKER = "picker"


class Outcome(StrEnum):
    """How a client's request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    CLIENT_ERROR = "client_error"
    REFUSED = "refused"
    DEADLINE = "deadline"
    FAILED = "failed"


class SwitchOutcome(StrEnum):
    """How a switch of a node's role ended. One that fails ends the process."""

    DONE = "done"
    REFUSED = "refused"
    GIVEN_UP = "given_up"


@dataclass(frozen=True)
class Label:
    """A label. `values` are all that it can have; without any, they are names of nodes or of what they run, as
    `meaning` says."""

    name: str
    meaning: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: the name that is scraped; a histogram's without `_bucket`, `_sum` and `_count`.
        unit: unit of its values; empty: it counts what its name says.
        bounds: the upper bounds of a histogram's buckets, in its unit, without infinity.
    """

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    roles: tuple[ProcessRole, ...]
    labels: tuple[Label, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def closed(self) -> bool:
        """Whether all its series are known from the start."""
        return all(label.values for label in self.labels)

    @property
    def series_max(self) -> int:
        """Series of one process with every label value; of pairs, those of one pair."""
        labelled = prod(len(label.values) or 1 for label in self.labels)
        return labelled * (len(self.bounds) + 3 if self.kind is MetricKind.HISTOGRAM else 1)


# Every series has these two.
