"""The table of all nodes that this gateway knows. Pure: no clock, task or socket.

A node is reachable from its first status until its connection is lost. Methods that record an event return commands
for the caller to execute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import inf

from baton.gateway.core.shared_sends import SharedSends
from baton.gateway.fleet.breaker import Breakers
from baton.gateway.fleet.cache_position import CachePosition
from baton.gateway.fleet.copies import Copies
from baton.gateway.fleet.fleet_node import FleetNode, Role
from baton.gateway.fleet.prefix_index import PrefixIndex
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import role_name

_RETRY_ROLE_S = 10.0
_SILENT = "starting, it sends no status yet"


@dataclass(frozen=True)
class LogLine:
    """Log a line. A warning needs the operator's attention."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class DropSession:
    """End the session with a lost or restarted node, if there is one, and with it all requests on the node."""

    role: Role
    address: str
    reason: str


@dataclass(frozen=True)
class ChangeRole:
    """Connect to a node again, in its new role, and ignore the old connection. The node's certificate must allow the
    new role."""

    address: str
    old: Role
    new: Role


FleetCommand = LogLine | DropSession | ChangeRole


@dataclass(frozen=True)
class _UnconfirmedRole:
    """A node that reports a role but could not be reached in it, perhaps because its certificate does not allow it.

    Attributes:
        until_s: time of the next attempt.
    """

    incarnation: int
    until_s: float
    reason: str


class NodeTable:
    """All nodes, by address.

    Args:
        model: name, architecture and config digest of the model that this gateway serves.
    """

    def __init__(self, model: node_status_pb2.ModelIdentity) -> None:
        self.prefills: dict[str, FleetNode] = {}
        self.decodes: dict[str, FleetNode] = {}
        self.breakers = Breakers()
        self._model = model
        self._index = PrefixIndex()
        self._copies = Copies()
        self._unconfirmed: dict[str, _UnconfirmedRole] = {}  # by address
        self._choices = count(1)  # numbers the choices of nodes
        self._sends: SharedSends | None = None
        self._costs_at_s = -inf  # time of the last comparison of the nodes' costs
        self._lost_at_s: dict[Role, float] = {}  # time when the last node of a role was lost or removed

    def nodes(self) -> Iterator[FleetNode]:
        yield from self.prefills.values()
        yield from self.decodes.values()

    def add(self, role: Role, address: str) -> FleetNode:
        """Adds a node at a new address."""
        self._unconfirmed.pop(address, None)
        return self._add(role, address, listed=role)

    def _add(self, role: Role, address: str, *, listed: Role) -> FleetNode:
        sends = None if self._sends is None else self._sends.of(role, address)
        node = self._of(role)[address] = FleetNode(role, address, listed, self._choices, sends)
        return node

    def remove(self, role: Role, address: str, now_s: float) -> None:
        self._note_loss(self._of(role)[address], now_s)
        self._drop(role, address)

    def _drop(self, role: Role, address: str) -> None:
        self.breakers.forget(self._of(role).pop(address).incarnation)
        self._index.forget(address)
        self._copies.forget(role, address)

    def _note_loss(self, node: FleetNode, now_s: float) -> None:
        """Notes that the node goes now, unless it was lost before."""
        if node.reachable or node.loading:
            self._lost_at_s[node.role] = now_s

    def status_received(
        self, role: Role, address: str, status: node_status_pb2.NodeStatus, now_s: float
    ) -> list[FleetCommand]:
        """Records a node's status.

        A node that reports another role than `role` is reconnected and then used in the role that it reports, unless
        its address is listed for that role too.
        """
        node = self._of(role)[address]
        # NOTE: an unchanged status is not a sign of life: a node whose device hangs repeats it.
        if not node.reachable or status != node.status:
            node.last_message_at_s = now_s
        info = status.info
        if status.HasField("loading"):
            return self._take_loading(node, status)
        if info.role != role:
            if info.role not in (node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE) or address in self._of(
                info.role
            ):
                return self._wrong_role(node, info.role)
            if status.next_role == role:
                return []  # the node is about to switch to this role
            unconfirmed = self._unconfirmed.get(address)
            if unconfirmed is not None and unconfirmed.incarnation == info.incarnation and now_s < unconfirmed.until_s:
                return self._wrong_role(node, info.role, unconfirmed.reason)
            moved = self._move(node, info.role, f"it is a {role_name(info.role)} node now, and not reached as one yet")
            moved.claimed_incarnation, moved.last_message_at_s = info.incarnation, now_s
            return [
                LogLine(f"{info.name} is a {role_name(info.role)} node now, {address}"),
                ChangeRole(address, role, info.role),
            ]
        commands: list[FleetCommand] = []
        copy_mismatch = self._copies.mismatch(role, address, info.name, info.model, now_s)
        mismatch = self._model_mismatch(info.model) or copy_mismatch
        if node.confirms(status, mismatch):
            node.take_confirmation(now_s)
            return []
        restarted = info.incarnation != node.incarnation
        if restarted or not node.reachable:
            shape = info.cache_shape
            commands.append(LogLine(f"{info.name}: connected, {address}, KV {shape.layout} x {shape.block_size}"))
        if mismatch and (restarted or node.detail != mismatch):
            commands.append(LogLine(f"{info.name} gets no requests: {mismatch}", warning=True))
        if restarted:
            commands.append(DropSession(role, address, "it was restarted"))
            self.breakers.forget(node.incarnation)
            self._forget_cache(node)
        old_costs = node.costs.reported
        node.take_status(status, mismatch, now_s)
        if node.costs.reported is not old_costs:
            self._costs_at_s = -inf
        self.breakers.reported(node.incarnation, stuck=status.stuck)
        self._unconfirmed.pop(address, None)
        return commands

    def lost(self, role: Role, address: str, reason: str, now_s: float) -> list[FleetCommand]:
        """Marks a silent or disconnected node as unreachable until its next status.

        If the node had another role than its list, it is next expected in the list's role, as after a restart.
        """
        node = self._of(role)[address]
        self._note_loss(node, now_s)
        if node.role != node.listed:
            return self._lost_in_other_role(node, reason)
        commands: list[FleetCommand] = []
        if node.reachable or node.loading:
            commands.append(_lost_line(node, reason))
        elif node.never_connected:
            commands.append(LogLine(f"{address}: unreachable, retrying: {reason}", warning=True))
        node.take_loss(reason)
        self._forget_cache(node)
        return [*commands, DropSession(role, address, reason)]

    def silent(self, role: Role, address: str) -> None:
        """Records that a connected node sends no status.

        A node that never sent one counts as loading: its start keeps its interpreter busy. A node that sent one before
        may be frozen, so it stays lost and requests do not wait for it.
        """
        node = self._of(role)[address]
        if not node.reachable and not node.loading and node.never_connected:
            node.take_loading(
                node_status_pb2.NodeStatus(info=node.status.info, loading=node_status_pb2.Loading(stage=_SILENT))
            )

    def message_received(self, role: Role, address: str, now_s: float) -> None:
        """Records a sign of life: a message about a request of this gateway."""
        self._of(role)[address].last_message_at_s = now_s

    def cache_changed(self, role: Role, address: str, batch: node_pb2.WatchCacheResponse) -> bool:
        """Records a change of the node's prefix cache.

        Returns False if earlier batches are missing. The node's cache is then unknown until its next snapshot.
        """
        node = self._of(role)[address]
        if batch.incarnation != node.incarnation or not node.cache.follows(batch):
            self._forget_cache(node)
            return False
        if batch.snapshot:
            self._index.forget(address)
        self._index.store(address, batch.stored, batch.outside, batch.below)
        self._index.remove(address, batch.removed)
        return True

    def node(self, role: Role, address: str) -> FleetNode:
        return self._of(role)[address]

    # ----

    def _of(self, role: Role) -> dict[str, FleetNode]:
        return self.prefills if role == node_status_pb2.ROLE_PREFILL else self.decodes

    def _forget_cache(self, node: FleetNode) -> None:
        node.cache = CachePosition()
        self._index.forget(node.address)

    def _take_loading(self, node: FleetNode, status: node_status_pb2.NodeStatus) -> list[FleetCommand]:
        commands: list[FleetCommand] = []
        if not node.loading:
            commands.append(LogLine(f"{status.info.name}: connected, {node.address}, not ready yet"))
            commands.append(DropSession(node.role, node.address, "it was restarted"))
            self.breakers.forget(node.incarnation)
            self._forget_cache(node)
        node.take_loading(status)
        return commands

    def _lost_in_other_role(self, node: FleetNode, reason: str) -> list[FleetCommand]:
        commands: list[FleetCommand] = []
        if node.reachable:
            commands.append(_lost_line(node, reason))
        elif not node.incarnation:  # the node has never answered in this role
            until_s = node.last_message_at_s + _RETRY_ROLE_S
            self._unconfirmed[node.address] = _UnconfirmedRole(node.claimed_incarnation, until_s, reason)
        self._move(node, node.listed, reason)
        return [*commands, ChangeRole(node.address, node.role, node.listed)]

    def _move(self, node: FleetNode, role: Role, detail: str) -> FleetNode:
        """Moves the node to the other role's table, where it is unreachable until its next status."""
        self._drop(node.role, node.address)
        moved = self._add(role, node.address, listed=node.listed)
        moved.detail, moved.retired = detail, node.retired
        return moved

    def _wrong_role(self, node: FleetNode, role: Role, why: str = "") -> list[FleetCommand]:
        wrong = f"it is a {role_name(role)} node, not a {role_name(node.role)} node"
        wrong += f", and cannot be reached as one: {why}" if why else ""
        if node.detail == wrong:
            return []
        node.reachable, node.detail = False, wrong
        self._forget_cache(node)
        return [
            LogLine(f"{node.address} is not used: {wrong}", warning=True),
            DropSession(node.role, node.address, wrong),
        ]

    def _model_mismatch(self, theirs: node_status_pb2.ModelIdentity) -> str:
        """Says why the node cannot serve this gateway's model; "" if it can."""
        ours = self._model
        if theirs.config_digest == ours.config_digest:
            digests = ours.vocabulary_digest, theirs.vocabulary_digest
            if "" in digests or digests[0] == digests[1]:  # older nodes send none
                return ""
            return (
                f"its {theirs.name} has another tokenizer (vocabulary digest {digests[1][:12]}) than this gateway's "
                f"{ours.name} ({digests[0][:12]}), so texts would be wrong; start both with one model"
            )
        return (
            f"it serves {theirs.name} ({theirs.architecture}, config digest {theirs.config_digest[:12]}), this gateway "
            f"{ours.name} ({ours.architecture}, config digest {ours.config_digest[:12]}); start both with one model"
        )


def _lost_line(node: FleetNode, reason: str) -> LogLine:
    if node.status.next_role:
        return LogLine(f"{node.name}: switching its role, {reason}")
    if node.loading:
        reason = f"while it was {node.detail}: {reason}"
    return LogLine(f"{node.name}: lost, {reason}", warning=True)
