"""Load of each node over the last minutes, for the page and `baton top`. Pure: the caller has the clock.

A point is about 12 bytes of JSON, so 50 nodes add about 45 kB to an answer.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.gateway.fleet.fleet_node import FleetNode
from baton.protos.v1 import node_status_pb2

HISTORY_STEP_S = 4.0
POINTS_KEPT = 75
# Readings come a little early or late; a point that is due within this time is taken now.
_EARLY_S = 0.5


class LoadPoint(NamedTuple):
    """The load of one node at one time; None where it is unknown, such as of a node that cannot be reached.

    Attributes:
        running: requests.
        tokens_per_s: prompt tokens computed and tokens generated, since the point before.
        kv_percent: used share of the KV blocks.
    """

    running: int | None = None
    tokens_per_s: int | None = None
    kv_percent: int | None = None


class _NodePoints:
    """The points of one node, and the count of its tokens at the last of them."""

    def __init__(self) -> None:
        self.points: deque[LoadPoint] = deque(maxlen=POINTS_KEPT)
        self._last: tuple[int, int, float] | None = None  # incarnation, tokens, time

    def add(self, node: FleetNode, now_s: float) -> None:
        if not node.reachable:
            self._last = None
            self.points.append(LoadPoint())
            return
        status = node.status
        tokens = _tokens(status)
        rate = None
        if tokens is not None and self._last is not None:
            incarnation, before, at_s = self._last
            if incarnation == node.incarnation and tokens >= before and now_s > at_s:
                rate = round((tokens - before) / (now_s - at_s))
        self._last = None if tokens is None else (node.incarnation, tokens, now_s)
        used = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
        self.points.append(LoadPoint(status.requests_running, rate, round(100 * min(1.0, max(0.0, used)))))


class NodeHistory:
    """The last points of every node that the fleet knows."""

    def __init__(self) -> None:
        self._of_nodes: dict[tuple[int, str], _NodePoints] = {}  # by role and address
        self._due_s = 0.0

    def read(self, nodes: Iterable[FleetNode], now_s: float) -> None:
        """Adds a point for each node if one is due; forgets nodes that are gone. Call it every few seconds."""
        if now_s < self._due_s - _EARLY_S:
            return
        self._due_s = now_s + HISTORY_STEP_S
        before, self._of_nodes = self._of_nodes, {}
        for node in nodes:
            key = (node.role, node.address)
            points = self._of_nodes[key] = before.get(key) or _NodePoints()
            points.add(node, now_s)

    def of(self, node: FleetNode) -> Iterator[LoadPoint]:
        """The points of a node, the oldest first."""
        points = self._of_nodes.get((node.role, node.address))
        return iter(()) if points is None else iter(points.points)


def _tokens(status: node_status_pb2.NodeStatus) -> int | None:
    """Tokens that the node has computed; None: it is of a release that does not count them."""
    if not status.HasField("generated_tokens_total"):
        return None
    return status.prompt_tokens_total + status.generated_tokens_total
