"""Decides how often nodes report to a gateway: less often in larger clusters, so that the gateway's work stays bounded.
Pure.
"""

from dataclasses import dataclass

_INTERVAL_S = 0.1
_STATUSES_PER_S = 2000.0  # of nodes that all change all the time; a status that has changed costs about 0.1 ms
_REPEAT_S = 1.0
_REPEATS_PER_S = 100.0


@dataclass
class WatchPace:
    """The pace of all status streams of one gateway.

    Attributes:
        num_nodes: number of listed nodes.
    """

    num_nodes: int = 0

    @property
    def interval_s(self) -> float:
        """The shortest time between two statuses of one node: 0.1 s for up to 200 nodes."""
        return max(_INTERVAL_S, self.num_nodes / _STATUSES_PER_S)

    @property
    def repeat_s(self) -> float:
        """The time after which an unchanged status comes again: 1 s for up to 100 nodes."""
        return max(_REPEAT_S, self.num_nodes / _REPEATS_PER_S)
