"""Decides whether a node should switch to a role that needs more nodes. Pure: loads in, a move out.

Several gateways may decide at once. From about the same loads they choose the same node, and a node that has just
switched refuses the next switch.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.protos.v1 import node_status_pb2

_PREFILL, _DECODE = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE
# Decode nodes need help above this share of used blocks or seats, the same as for the autoscalers.
_FULL = 0.8
# After a move, the remaining nodes of the giving role must have at most this share of the load at which it needs nodes.
_IDLE = 0.5


@dataclass(frozen=True)
class BalanceRules:
    """Thresholds for moving a node.

    Args:
        backlog_s: mean backlog of prefill nodes above which their role needs more nodes.
        hold_s: time for which the same move must be due without a break.
        cool_down_s: time without moves after nodes changed their roles, joined or left.
    """

    backlog_s: float
    hold_s: float
    cool_down_s: float


@dataclass(frozen=True)
class Load:
    """Load of one usable node.

    Attributes:
        need: load by the work of its role; above 1 its role needs more nodes.
        used: load by all its work, on the same scale: a prefill node may decode, a decode node may compute prompts.
        in_listed_role: whether the node has the role of its address list.
    """

    address: str
    incarnation: int
    role: Role
    need: float
    used: float
    in_listed_role: bool = True


@dataclass(frozen=True)
class Move:
    """Switch the node at this address to the role."""

    address: str
    role: Role
    reason: str


def loads_of(nodes: Iterable[FleetNode], rules: BalanceRules) -> list[Load]:
    """The loads of all nodes that may get requests."""
    return [_load(node, rules) for node in nodes if node.open]


def _load(node: FleetNode, rules: BalanceRules) -> Load:
    status = node.status
    blocks = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
    wanted = max(status.decode_rows, status.requests_running) + status.requests_waiting
    seats = wanted / status.max_batch_requests if status.max_batch_requests else 0.0
    backlog = max(0.0, status.backlog_s) / rules.backlog_s
    streams = max(blocks, seats) / _FULL
    need = backlog if node.role == _PREFILL else streams
    in_listed_role = node.role == node.listed
    return Load(node.address, node.incarnation, node.role, need, max(backlog, streams), in_listed_role)


class Balance:
    """Decides on moves; remembers how long a role has needed nodes."""

    def __init__(self, rules: BalanceRules) -> None:
        self._rules = rules
        self._nodes: Set[tuple[int, Role]] | None = None
        self._quiet_until_s = 0.0
        self._since: tuple[Role, float] | None = None  # the role that needs nodes, and since when

    def decide(self, loads: Sequence[Load], now_s: float, *, fixed: Set[int] = frozenset()) -> Move | None:
        """Returns a move that has been due for `hold_s`, else None. Call it regularly with all usable nodes.

        Args:
            fixed: incarnations of nodes that cannot switch.
        """
        nodes = {(load.incarnation, load.role) for load in loads}
        if nodes != self._nodes:
            self._nodes, self._since = nodes, None
            self._quiet_until_s = now_s + self._rules.cool_down_s
        move = self._due_move(loads, fixed)
        if move is None or now_s < self._quiet_until_s:
            self._since = None
            return None
        if self._since is None or self._since[0] != move.role:
            self._since = move.role, now_s
        return move if now_s - self._since[1] >= self._rules.hold_s else None

    def failed(self, now_s: float) -> None:
        """Starts a cool-down after a move that failed."""
        self._since, self._quiet_until_s = None, now_s + self._rules.cool_down_s

    def _due_move(self, loads: Sequence[Load], fixed: Set[int]) -> Move | None:
        for role, other in ((_DECODE, _PREFILL), (_PREFILL, _DECODE)):
            needing = [load for load in loads if load.role == role]
            giving = [load for load in loads if load.role == other]
            able = [load for load in giving if load.incarnation not in fixed]
            if not needing or len(giving) < 2 or not able:
                continue
            need = sum(load.need for load in needing) / len(needing)
            left = sum(load.used for load in giving) / (len(giving) - 1)
            if need > 1 and left <= _IDLE:
                # All gateways choose the same node. Nodes that return to the role of their list go first.
                chosen = min(able, key=lambda load: (load.in_listed_role, load.address))
                return Move(chosen.address, role, f"need {need:.2f}, the others would have {left:.2f}")
        return None
