"""How much work a node has between two reports: what was sent is added, the time that passes is subtracted. Pure.

A node that works reports often. One that is stuck does not, so only a little time is ever subtracted from a report.
"""

_MOST_PASSED_S = 0.25  # a few intervals of reports


class Backlog:
    """Predicted seconds of work that wait on one node."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at_s = 0.0
        self._may_pass_s = 0.0

    def reported(self, seconds: float, now_s: float) -> None:
        """The node's own count, which includes what was sent before."""
        self._seconds, self._at_s, self._may_pass_s = seconds, now_s, _MOST_PASSED_S

    def add(self, seconds: float, now_s: float) -> None:
        """Work that has been sent to the node."""
        self._seconds = self.at(now_s) + seconds
        self._may_pass_s -= self._passed_s(now_s)
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        return max(0.0, self._seconds - self._passed_s(now_s))

    def _passed_s(self, now_s: float) -> float:
        return min(max(0.0, now_s - self._at_s), self._may_pass_s)
