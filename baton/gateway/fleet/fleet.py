"""The table of all nodes that this gateway knows, and the choice of nodes from it. Pure: no clock, task or socket.

A node is reachable from its first status until its connection is lost. Methods that record something return commands
for the shell.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import inf

from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.core.request import Request
from baton.gateway.fleet.adapters import serving_adapters
from baton.gateway.fleet.affinity import Affinity
from baton.gateway.fleet.breaker import Breakers
from baton.gateway.fleet.cache_position import CachePosition
from baton.gateway.fleet.copies import Copies
from baton.gateway.fleet.fleet_node import FleetNode, Role, settled
from baton.gateway.fleet.node_costs import current_costs
from baton.gateway.fleet.placement import Placement, place
from baton.gateway.fleet.prefix_index import PrefixIndex
from baton.gateway.fleet.router import NodeView, RoutedRequest, pick_prefill
from baton.protos.internal.v1 import node_pb2
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.convert import role_name

_PROVE_AGAIN_S = 10.0
_SILENT = "starting, it sends no status yet"
_COSTS_EACH_S = 0.1  # nodes report about as often


@dataclass(frozen=True)
class LogLine:
    """A line for the operator. A warning needs attention."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class DropSession:
    """A node is lost or was restarted: end the session with it, if there is one, and with that all requests on it."""

    role: Role
    address: str
    reason: str


@dataclass(frozen=True)
class ChangeRole:
    """Connect to a node anew, as to one of another role: only one whose certificate allows that role can answer. What
    still comes on the old connection counts no more."""

    address: str
    old: Role
    new: Role


FleetCommand = LogLine | DropSession | ChangeRole


@dataclass(frozen=True)
class _Unproved:
    """A node says that it has a role, and was not reached as a node of it, for which its certificate may be the reason.

    Attributes:
        until_s: when it is tried again.
    """

    incarnation: int
    until_s: float
    reason: str


class Fleet:
    """All nodes.

    Args:
        model: name, architecture and config digest of the model that this gateway serves.
        max_context_tokens: the model's own limit.
        policy: where prompts may be prefilled.
    """

    def __init__(self, model: node_status_pb2.ModelIdentity, max_context_tokens: int, policy: LocalPolicy) -> None:
        self.prefills: dict[str, FleetNode] = {}  # by address
        self.decodes: dict[str, FleetNode] = {}
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._policy = policy
        self._index = PrefixIndex()
        self._affinity = Affinity()
        self._copies = Copies()
        self.breakers = Breakers()
        self._unproved: dict[str, _Unproved] = {}  # by address
        self._turns = count(1)  # of the choices of nodes
        self._costs_at_s = -inf

    # ---- recording

    def add(self, role: Role, address: str) -> FleetNode:
        """Adds a node at a new address."""
        self._unproved.pop(address, None)
        return self._add(role, address, listed=role)

    def _add(self, role: Role, address: str, *, listed: Role) -> FleetNode:
        node = self._of(role)[address] = FleetNode(role, address, listed, self._turns)
        return node

    def remove(self, role: Role, address: str) -> None:
        self.breakers.forget(self._of(role).pop(address).incarnation)
        self._index.forget(address)
        self._copies.forget(role, address)

    def status_received(
        self, role: Role, address: str, status: node_status_pb2.NodeStatus, now_s: float
    ) -> list[FleetCommand]:
        """Records a node's status. A node that has another role than this one is used in the role that it has, once it
        is reached as a node of that role, unless its address is listed for that role too."""
        node = self._of(role)[address]
        # NOTE: nodes repeat an unchanged status. That is no sign of life: a node whose device hangs sends it too.
        if not node.reachable or status != node.status:
            node.last_message_at_s = now_s
        info = status.info
        if status.HasField("loading"):
            return self._loads(node, status)
        if info.role != role:
            if info.role not in (node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE) or address in self._of(
                info.role
            ):
                return self._wrong_role(node, info.role)
            if status.next_role == role:
                return []  # it is about to be one of this role
            unproved = self._unproved.get(address)
            if unproved is not None and unproved.incarnation == info.incarnation and now_s < unproved.until_s:
                return self._wrong_role(node, info.role, unproved.reason)
            moved = self._move(node, info.role, f"it is a {role_name(info.role)} node now, and not reached as one yet")
            moved.claimed, moved.last_message_at_s = info.incarnation, now_s
            return [
                LogLine(f"{info.name} is a {role_name(info.role)} node now, {address}"),
                ChangeRole(address, role, info.role),
            ]
        commands: list[FleetCommand] = []
        differs = self._copies.differs(role, address, info.name, info.model, now_s)
        foreign = self._foreign(info.model) or differs
        restarted = info.incarnation != node.incarnation
        if restarted or not node.reachable:
            shape = info.cache_shape
            commands.append(LogLine(f"{info.name}: connected, {address}, KV {shape.layout} x {shape.block_size}"))
        if foreign and (restarted or node.detail != foreign):
            commands.append(LogLine(f"{info.name} gets no requests: {foreign}", warning=True))
        if restarted:
            commands.append(DropSession(role, address, "it was restarted"))
            self.breakers.forget(node.incarnation)
            self._forget_cache(node)
        measured = node.costs.reported
        node.take_status(status, foreign, now_s)
        if node.costs.reported is not measured:
            self._costs_at_s = -inf
        self.breakers.reported(node.incarnation, stuck=status.stuck)
        self._unproved.pop(address, None)
        return commands

    def lost(self, role: Role, address: str, reason: str) -> list[FleetCommand]:
        """Marks a node that is silent, or whose connection broke, as unreachable until its next status. One that has
        another role than its list says is expected in that of its list, as after a restart."""
        node = self._of(role)[address]
        if node.role != node.listed:
            return self._lost_elsewhere(node, reason)
        commands: list[FleetCommand] = []
        if node.reachable or node.loading:
            commands.append(_lost_line(node, reason))
        elif node.never_connected:
            commands.append(LogLine(f"{address}: unreachable, retrying: {reason}", warning=True))
        node.take_loss(reason)
        self._forget_cache(node)
        return [*commands, DropSession(role, address, reason)]

    def silent(self, role: Role, address: str) -> None:
        """The node is connected and sends no status. If it never sent one, its start keeps its interpreter busy; one
        that did may be frozen, and stays lost: requests do not wait for it."""
        node = self._of(role)[address]
        if not node.reachable and not node.loading and node.never_connected:
            node.take_loading(
                node_status_pb2.NodeStatus(info=node.status.info, loading=node_status_pb2.Loading(stage=_SILENT))
            )

    def message_received(self, role: Role, address: str, now_s: float) -> None:
        """Records a sign of life: a message about a request of this gateway."""
        self._of(role)[address].last_message_at_s = now_s

    def cache_changed(self, role: Role, address: str, batch: node_pb2.WatchCacheResponse) -> bool:
        """Records a change of the node's prefix cache. False: batches before it are lost; the node's cache is unknown
        until its next snapshot."""
        node = self._of(role)[address]
        if batch.incarnation != node.incarnation or not node.cache.follows(batch):
            self._forget_cache(node)
            return False
        if batch.snapshot:
            self._index.forget(address)
        self._index.store(address, batch.stored)
        self._index.remove(address, batch.removed)
        return True

    def node(self, role: Role, address: str) -> FleetNode:
        return self._of(role)[address]

    # ---- choices for one request

    def place(self, wanted: RoutedRequest, now_s: float) -> Placement | None:
        """The node that decodes a request, and where its prompt is prefilled; None: no node can take it."""
        wanted = self._of_session(wanted)
        self._update_costs(now_s)
        cached = self._cached_tokens(self.nodes(), wanted)
        decodes = [_at(node.decode_view(), cached, node.queue_s(now_s)) for node in self.decoding_nodes()]
        prefills = [_at(node.view(), cached, node.queue_s(now_s)) for node in self.prefills.values()]
        placement = place(decodes, prefills, wanted)
        if placement is not None:
            self._picked(self.decoding_node(placement.decode), placement.decode, wanted)
        return placement

    def pick_prefill(
        self, decode: FleetNode, wanted: RoutedRequest, now_s: float, *, placed: int | None = None
    ) -> FleetNode | None:
        """The prefill node, paired with the decode node, that fits the request best, or None.

        Args:
            placed: incarnation of the node that `place` chose; it is taken while it is usable.
        """
        wanted = self._of_session(wanted)
        views = self.prefill_views(wanted, now_s)
        first = [view for view in views if view.incarnation == placed]
        picked = pick_prefill(first, decode.view(), wanted) or pick_prefill(views, decode.view(), wanted)
        return None if picked is None else self._picked(self.prefills[picked.address], picked, wanted)

    def prefill_views(self, wanted: RoutedRequest, now_s: float) -> list[NodeView]:
        """All prefill nodes as they are now, with how much of the request's prompt their caches have."""
        self._update_costs(now_s)
        cached = self._cached_tokens(self.prefills.values(), wanted)
        return [_at(node.view(), cached, node.queue_s(now_s)) for node in self.prefills.values()]

    def _update_costs(self, now_s: float) -> None:
        """The step costs of nodes that get no work age (`baton.gateway.fleet.node_costs`)."""
        if now_s - self._costs_at_s < _COSTS_EACH_S:
            return
        self._costs_at_s = now_s
        nodes = [node for node in self.nodes() if node.serves]  # another model's steps say nothing of ours
        for node, costs in zip(nodes, current_costs([node.costs for node in nodes]), strict=True):
            node.use_costs(costs)

    def decoding_nodes(self) -> Iterator[FleetNode]:
        """All nodes that can decode: the decode nodes, then the prefill nodes that do it too."""
        yield from self.decodes.values()
        yield from (node for node in self.prefills.values() if node.also_decodes)

    def decoding_node(self, view: NodeView) -> FleetNode:
        """The node of one of the views that `place` chooses from."""
        return (self.prefills if view.also_prefills else self.decodes)[view.address]

    def look_ahead(self, request: Request) -> Iterator[None]:
        """Hashes as much of the prompt as the choice of its nodes will need, some at each step."""
        if request.blocks is None or request.sampling.prompt_logprobs is not None:
            return
        for identity, block_size in {node.cache_kind for node in self.nodes() if node.cache.known}:
            yield from self._index.look_ahead(request.blocks.numbers(identity, block_size))

    def _cached_tokens(self, nodes: Iterable[FleetNode], wanted: RoutedRequest) -> dict[str, int]:
        """By address; nodes that have nothing are left out."""
        if wanted.prompt is None:
            return {}
        kinds: dict[tuple[str, int], list[str]] = {}
        for node in nodes:
            if node.cache.known:
                kinds.setdefault(node.cache_kind, []).append(node.address)
        cached: dict[str, int] = {}
        for (identity, block_size), addresses in kinds.items():
            found = self._index.cached_blocks(wanted.prompt.numbers(identity, block_size), addresses)
            # The last token is computed in any case.
            most = (wanted.num_tokens - 1) // block_size
            cached.update((address, min(blocks, most) * block_size) for address, blocks in found.items())
        return cached

    def _of_session(self, wanted: RoutedRequest) -> RoutedRequest:
        if not wanted.session_id:
            return wanted
        return replace(wanted, session_nodes=self._affinity.nodes(wanted.session_id))

    def _picked(self, node: FleetNode, view: NodeView, wanted: RoutedRequest) -> FleetNode:
        self._affinity.note(wanted.session_id, node.role, node.address)
        node.cached_tokens = view.cached_tokens
        return node

    # ---- the whole

    def nodes(self) -> Iterator[FleetNode]:
        yield from self.prefills.values()
        yield from self.decodes.values()

    def reachable_pairs(self) -> list[tuple[FleetNode, FleetNode]]:
        """Every prefill node with every decode node, where both are reachable."""
        decodes = [decode for decode in self.decodes.values() if decode.reachable]
        return [(prefill, decode) for prefill in self.prefills.values() if prefill.reachable for decode in decodes]

    def pairs_under_way(self) -> bool:
        """Whether a pair of usable nodes is neither ready nor refused: it is being made, or made again."""
        return any(
            prefill.open and decode.open and not settled(prefill, decode) for prefill, decode in self.reachable_pairs()
        )

    def nodes_load(self) -> bool:
        """Whether a node has started and does not serve yet, or is being reached for the first time."""
        return any(node.loading or node.never_connected for node in self.nodes())

    def serves(self) -> bool:
        """Whether a request could be served now."""
        if self._policy is not LocalPolicy.STRICT:
            return any(node.open for node in self.decoding_nodes())
        return any(
            decode.incarnation in prefill.view().ready_peers
            for prefill, decode in self.reachable_pairs()
            if prefill.open and decode.open
        )

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that some decode node can hold; the model's own limit while none is known.

        Prefill nodes do not count: a longer request that one of them began could continue on no decode node.
        """
        known = [node.view().max_context_tokens for node in self.decodes.values() if not node.detail]
        return min(self._max_context_tokens, max(known, default=self._max_context_tokens))

    def adapters(self) -> dict[str, AdapterRef]:
        """The adapters that requests can name as their model, by name."""
        return serving_adapters(self.nodes(), self.reachable_pairs())

    def may_have(self, revision: str, adapter: AdapterRef | None = None) -> bool:
        """Whether some node has, or may turn out to have, this revision of the weights, and the adapter."""
        return any(
            not node.revision or (node.revision == revision and (adapter is None or adapter in node.view().adapters))
            for node in self.nodes()
        )

    def explain(self) -> str:
        """Why no node can be chosen for a request, node by node; while some load, only these."""
        nodes = list(self.nodes())
        nodes = [node for node in nodes if node.loading] or nodes
        return "; ".join(node.explain() for node in nodes) or "no node address is known"

    def loads(self) -> list[operations_pb2.NodeLoad]:
        """How full each reachable node is."""
        return [
            operations_pb2.NodeLoad(
                name=node.name,
                address=node.address,
                role=node.role,
                blocks_total=node.status.blocks_total,
                blocks_free=node.status.blocks_free,
                requests_running=node.status.requests_running,
                requests_waiting=node.status.requests_waiting,
                tokens_waiting=node.status.tokens_waiting,
            )
            for node in self.nodes()
            if node.reachable
        ]

    def report(self) -> list[operations_pb2.NodeReport]:
        reports = []
        for node in self.nodes():
            report = operations_pb2.NodeReport(
                address=node.address,
                reachable=node.reachable,
                detail=node.detail,
                cache_sequence=node.cache.sequence,
            )
            report.status.CopyFrom(node.status)
            del report.status.peers[:]
            report.status.peers.extend(node.peers.values())
            reports.append(report)
        return reports

    # ----

    def _of(self, role: Role) -> dict[str, FleetNode]:
        return self.prefills if role == node_status_pb2.ROLE_PREFILL else self.decodes

    def _forget_cache(self, node: FleetNode) -> None:
        node.cache = CachePosition()
        self._index.forget(node.address)

    def _loads(self, node: FleetNode, status: node_status_pb2.NodeStatus) -> list[FleetCommand]:
        commands: list[FleetCommand] = []
        if not node.loading:
            commands.append(LogLine(f"{status.info.name}: connected, {node.address}, not ready yet"))
            commands.append(DropSession(node.role, node.address, "it was restarted"))
            self.breakers.forget(node.incarnation)
            self._forget_cache(node)
        node.take_loading(status)
        return commands

    def _lost_elsewhere(self, node: FleetNode, reason: str) -> list[FleetCommand]:
        commands: list[FleetCommand] = []
        if node.reachable:
            commands.append(_lost_line(node, reason))
        elif not node.incarnation:  # it has never answered as a node of this role
            until_s = node.last_message_at_s + _PROVE_AGAIN_S
            self._unproved[node.address] = _Unproved(node.claimed, until_s, reason)
        self._move(node, node.listed, reason)
        return [*commands, ChangeRole(node.address, node.role, node.listed)]

    def _move(self, node: FleetNode, role: Role, detail: str) -> FleetNode:
        """To the nodes of the other role, where it is unreachable until its next status."""
        self.remove(node.role, node.address)
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

    def _foreign(self, theirs: node_status_pb2.ModelIdentity) -> str:
        """Why the node cannot serve this gateway's model; empty when it can."""
        ours = self._model
        if theirs.config_digest == ours.config_digest:
            return ""
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


def _at(view: NodeView, cached: Mapping[str, int], queue_s: float) -> NodeView:
    """The node as one request finds it."""
    return (view.with_cached(cached[view.address]) if view.address in cached else view).with_queue(queue_s)
