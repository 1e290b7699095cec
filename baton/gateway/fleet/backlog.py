"""Estimates a node's backlog between two reports: adds the work sent to it, subtracts the time that passes. Pure.

A node that makes progress reports often and a stuck node does not, so at most `_MAX_DRAIN_S` is subtracted per report.
"""

_MAX_DRAIN_S = 0.25  # a few report intervals


class Backlog:
    """Predicted seconds of work waiting on one node."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at_s = 0.0
        self._drainable_s = 0.0

    def reported(self, seconds: float, now_s: float) -> None:
        """Replaces the estimate by the node's report, which includes everything sent before it."""
        self._seconds, self._at_s, self._drainable_s = seconds, now_s, _MAX_DRAIN_S

    def add(self, seconds: float, now_s: float) -> None:
        """Adds work that was sent to the node."""
        self._seconds = self.at(now_s) + seconds
        self._drainable_s -= self._drained_s(now_s)
        self._at_s = now_s

    def add_earlier(self, seconds: float) -> None:
        """Adds work that was sent to the node since its last report, at an unknown time."""
        self._seconds += seconds

    def at(self, now_s: float) -> float:
        return max(0.0, self._seconds - self._drained_s(now_s))

    def _drained_s(self, now_s: float) -> float:
        return min(max(0.0, now_s - self._at_s), self._drainable_s)
