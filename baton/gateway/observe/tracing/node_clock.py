"""Places a node's times on the gateway's clock. Pure.

A node reports seconds since it began with a call. It began after the gateway had sent the call, and each report reached
the gateway after what it reports: so the beginning lies between two bounds, and their middle is taken. The error is at
most half of what the fastest message and its answer took.
"""


class NodeClock:
    """Of one call to one node.

    Args:
        sent_at_s: when the gateway sent it.
    """

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s
        self._latest_s: float | None = None

    def seen(self, arrived_at_s: float, reported_s: float | None) -> None:
        """A message has arrived with this report; None: without one, from a node that reports no times."""
        if reported_s is None:
            return
        began_s = arrived_at_s - reported_s
        self._latest_s = began_s if self._latest_s is None else min(self._latest_s, began_s)

    @property
    def began_s(self) -> float:
        """When the node began with the call; when it was sent, where nothing is known."""
        if self._latest_s is None:
            return self._sent_at_s
        return max(self._sent_at_s, (self._sent_at_s + self._latest_s) / 2)

    def at(self, arrived_at_s: float, reported_s: float | None) -> float:
        """When what a message reports has happened; its arrival, where the node does not say."""
        return arrived_at_s if reported_s is None else min(arrived_at_s, self.began_s + reported_s)
