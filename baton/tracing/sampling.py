"""Decides which traces are exported: a sample, chosen on arrival, and those of failed, slow or retried requests.

A request is slow if it missed its TTFT or TPOT. Pure."""

from dataclasses import dataclass

from baton.metrics.metric import Outcome
from baton.tracing.context import TraceContext

HEAD, FAILED, SLOW, RETRIED = "head", "failed", "slow", "retried"

_FAILURES = frozenset({Outcome.FAILED, Outcome.DEADLINE})
_RANDOM_BITS = 64  # of a trace id, its lower half


@dataclass(frozen=True)
class Sampling:
    """Which requests are sampled when they arrive.

    Args:
        ratio: share of the requests without a caller's trace.
    """

    ratio: float

    def at_head(self, trace_id: int, parent: TraceContext | None) -> bool:
        """Whether a request is sampled when it arrives. The caller's decision counts, if there is one; else the trace
        id decides, so that all processes with this ratio decide alike."""
        if parent is not None:
            return parent.sampled
        return trace_id % (1 << _RANDOM_BITS) < self.ratio * (1 << _RANDOM_BITS)

    def at_end(self, *, sampled: bool, outcome: Outcome, slow: bool, retried: bool) -> str:
        """The reason to export a request's trace; empty: it is not exported."""
        if sampled:
            return HEAD
        if outcome in _FAILURES:
            return FAILED
        if slow:
            return SLOW
        return RETRIED if retried else ""
