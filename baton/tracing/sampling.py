"""Decides which traces are exported: a sample, chosen on arrival, and those of failed, slow or retried requests.
Pure."""

from dataclasses import dataclass

from baton.metrics.declared import Outcome
from baton.tracing.context import TraceContext

HEAD, FAILED, SLOW, RETRIED = "head", "failed", "slow", "retried"

_FAILURES = frozenset({Outcome.FAILED, Outcome.DEADLINE})
_RANDOM_BITS = 64  # of a trace id, its lower half


@dataclass(frozen=True)
class Sampling:
    """The settings `trace_sample` and `trace_slow_s`.

    Args:
        ratio: share of the requests without a caller's trace that are sampled when they arrive.
        slow_s: requests that take longer are always exported; None: no bound.
    """

    ratio: float
    slow_s: float | None = None

    def at_head(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether a request is sampled when it arrives. The caller's decision counts, if there is one; else the trace
        id decides, so that all processes with this ratio decide alike."""
        if parent is not None:
            return parent.sampled
        return trace_id % (1 << _RANDOM_BITS) < self.ratio * (1 << _RANDOM_BITS)

    def at_end(self, *, sampled: bool, outcome: Outcome, total_s: float, retried: bool) -> str:
        """The reason to export a request's trace; empty: it is not exported."""
        if sampled:
            return HEAD
        if outcome in _FAILURES:
            return FAILED
        if self.slow_s is not None and total_s > self.slow_s:
            return SLOW
        return RETRIED if retried else ""
