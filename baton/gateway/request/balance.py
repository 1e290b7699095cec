"""Whether a node should switch to a role that the cluster lacks. Pure: loads in, a move out.

Several gateways may decide at once: from about the same loads they choose the same node, and a node that has just
switched refuses the next switch.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.protos.v1 import node_status_pb2

_PREFILL, _DECODE = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE
# Of the decode nodes' blocks or seats, as the autoscalers have it.
_FULL = 0.8
# The nodes that stay must have at most this part of the load at which their role would be the one that needs nodes.
_IDLE = 0.5


@dataclass(frozen=True)
class BalanceRules:
    """When to move a node.

    Args:
        backlog_s: prompts of more seconds than that wait on the average prefill node: their role needs nodes.
        hold_s: so long one role must need nodes, and the other one have too many, without a break.
        cool_down_s: after a node has changed its role, or nodes came or went, nothing is moved for so long.
    """

    backlog_s: float
    hold_s: float
    cool_down_s: float


@dataclass(frozen=True)
class Load:
    """One usable node.

    Attributes:
        need: 1 where its role needs more nodes.
        used: as `need`, by all that it does: a prefill node may decode, a decode node compute prompts.
        at_home: whether it has the role of its list.
    """

    address: str
    incarnation: int
    role: Role
    need: float
    used: float
    at_home: bool = True


@dataclass(frozen=True)
class Move:
    """Let the node at this address switch to the role."""

    address: str
    role: Role
    why: str


def loads_of(nodes: Iterable[FleetNode], rules: BalanceRules) -> list[Load]:
    """Of the nodes that can be used."""
    return [_load(node, rules) for node in nodes if node.open]


def _load(node: FleetNode, rules: BalanceRules) -> Load:
    status = node.status
    blocks = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
    wanted = max(status.decode_rows, status.requests_running) + status.requests_waiting
    seats = wanted / status.max_batch_requests if status.max_batch_requests else 0.0
    backlog = max(0.0, status.backlog_s) / rules.backlog_s
    streams = max(blocks, seats) / _FULL
    need = backlog if node.role == _PREFILL else streams
    at_home = node.role == node.listed
    return Load(node.address, node.incarnation, node.role, need, max(backlog, streams), at_home)


class Balance:
    """Remembers how long a role has needed nodes."""

    def __init__(self, rules: BalanceRules) -> None:
        self._rules = rules
        self._nodes: Set[tuple[int, Role]] | None = None
        self._quiet_until_s = 0.0
        self._since: tuple[Role, float] | None = None  # the role that needs nodes, and since when

    def decide(self, loads: Sequence[Load], now_s: float, *, fixed: Set[int] = frozenset()) -> Move | None:
        """Called every now and then with all usable nodes.

        Args:
            fixed: incarnations of nodes that cannot switch.
        """
        nodes = {(load.incarnation, load.role) for load in loads}
        if nodes != self._nodes:
            self._nodes, self._since = nodes, None
            self._quiet_until_s = now_s + self._rules.cool_down_s
        move = self._wanted(loads, fixed)
        if move is None or now_s < self._quiet_until_s:
            self._since = None
            return None
        if self._since is None or self._since[0] != move.role:
            self._since = move.role, now_s
        return move if now_s - self._since[1] >= self._rules.hold_s else None

    def failed(self, now_s: float) -> None:
        """The move was not made: a pause before the next one."""
        self._since, self._quiet_until_s = None, now_s + self._rules.cool_down_s

    def _wanted(self, loads: Sequence[Load], fixed: Set[int]) -> Move | None:
        for role, other in ((_DECODE, _PREFILL), (_PREFILL, _DECODE)):
            needing = [load for load in loads if load.role == role]
            giving = [load for load in loads if load.role == other]
            able = [load for load in giving if load.incarnation not in fixed]
            if not needing or len(giving) < 2 or not able:
                continue
            need = sum(load.need for load in needing) / len(needing)
            left = sum(load.used for load in giving) / (len(giving) - 1)
            if need > 1 and left <= _IDLE:
                # The same one in each gateway: first a node that goes back to the role of its list.
                chosen = min(able, key=lambda load: (load.at_home, load.address))
                return Move(chosen.address, role, f"need {need:.2f}, the others would have {left:.2f}")
        return None
