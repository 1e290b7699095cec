"""How much work a node has between two reports: what was sent is added, the time that passes is subtracted. Pure."""


class Backlog:
    """Predicted seconds of work that wait on one node."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at_s = 0.0

    def reported(self, seconds: float, now_s: float) -> None:
        """The node's own count, which includes what was sent before."""
        self._seconds, self._at_s = seconds, now_s

    def add(self, seconds: float, now_s: float) -> None:
        """Work that has been sent to the node."""
        self._seconds, self._at_s = self.at(now_s) + seconds, now_s

    def at(self, now_s: float) -> float:
        return max(0.0, self._seconds - max(0.0, now_s - self._at_s))
