"""Decides which traces are exported: a sample, chosen on arrival, and those of failed, late or retried requests.
Pure."""

from dataclasses import dataclass

from baton.metrics.declared import Outcome
from baton.tracing.context import TraceContext

HEAD, FAILED, LATE, RETRIED = "head", "failed", "late", "retried"

_FAILURES = frozenset({Outcome.FAILED, Outcome.DEADLINE})
_RANDOM_BITS = 64  # of a trace id, its lower half


@dataclass(frozen=True)
class Sampling:
    """Which share of the requests without a caller's trace is sampled when they arrive."""

    ratio: float

    def at_head(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether a request is sampled when it arrives. The caller's decision counts, if there is one; else the trace
        id decides, so that all processes with this ratio decide alike."""
        if parent is not None:
            return parent.sampled
        return trace_id % (1 << _RANDOM_BITS) < self.ratio * (1 << _RANDOM_BITS)

    def at_end(self, *, sampled: bool, outcome: Outcome, late: bool, retried: bool) -> str:
        """The reason to export a request's trace; empty: it is not exported.

        Args:
            late: it missed its TTFT or its TPOT.
        """
        if sampled:
            return HEAD
        if outcome in _FAILURES:
            return FAILED
        if late:
            return LATE
        return RETRIED if retried else ""
