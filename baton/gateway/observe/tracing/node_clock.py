"""Converts a node's times to the gateway's clock. Pure.

A node reports seconds since it began a call. It began after the gateway had sent the call, and each report arrives
after the reported event. So the beginning lies between two bounds, and the middle is used. The error is at most half of
the fastest round trip.
"""


class NodeClock:
    """The node's clock for one call.

    Args:
        sent_at_s: time at which the gateway sent the call.
    """

    def __init__(self, sent_at_s: float) -> None:
        self._sent_at_s = sent_at_s
        self._latest_s: float | None = None

    def seen(self, arrived_at_s: float, reported_s: float | None) -> None:
        """Records a message and its reported time. `reported_s` is None for a node that reports no times."""
        if reported_s is None:
            return
        began_s = arrived_at_s - reported_s
        self._latest_s = began_s if self._latest_s is None else min(self._latest_s, began_s)

    @property
    def began_s(self) -> float:
        """Estimated time at which the node began the call; without reports, the time at which it was sent."""
        if self._latest_s is None:
            return self._sent_at_s
        return max(self._sent_at_s, (self._sent_at_s + self._latest_s) / 2)

    def at(self, arrived_at_s: float, reported_s: float | None) -> float:
        """Estimated time of the event that a message reports; without a report, the arrival of the message."""
        return arrived_at_s if reported_s is None else min(arrived_at_s, self.began_s + reported_s)
