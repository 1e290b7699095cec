"""The table of all nodes that this gateway knows, and the choice of nodes from it. Pure: no clock, task or socket.

A node is reachable from its first status until its connection is lost. Methods that record something return commands
for the shell.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from baton.convert import costs_from_proto
from baton.types import LocalPolicy
from gateway.affinity import Affinity
from gateway.backlog import Backlog
from gateway.cache_position import CachePosition
from gateway.placement import Placement, place
from gateway.prediction import prompt_s
from gateway.prefix_index import PrefixIndex
from gateway.request import Request
from gateway.router import NodeView, Wanted, pick_decode, pick_prefill
from protos.baton.v1 import common_pb2, generation_pb2, node_pb2

Role: TypeAlias = common_pb2.Role.ValueType

_DTYPE_BYTES = {"float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_NEVER_CONNECTED = "not connected yet"
_UNKNOWN = NodeView("", 0, (), False, 0, 1, 0, 0, 0, frozenset())


@dataclass(frozen=True)
class LogLine:
    """A line for the operator. A warning needs attention."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class DropSession:
    """A decode node is lost or was restarted: end the session with it, and with that all requests on it."""

    address: str
    reason: str


FleetCommand = LogLine | DropSession


class FleetNode:
    """One node: its last status, its peers, and what this gateway has sent to it since that status."""

    def __init__(self, role: Role, address: str) -> None:
        self.role = role
        self.address = address
        self.reachable = False
        self.detail = _NEVER_CONNECTED  # why it cannot be used; empty when it can
        self.status = node_pb2.NodeStatus()
        self.peers: dict[int, common_pb2.PeerState] = {}  # by incarnation
        self.last_message_at_s = 0.0  # last message on any connection
        self.retired = False  # no longer listed: removed once its requests are done
        self.cache = CachePosition()
        self.cached_tokens = 0  # that it has of the prompt for which it was chosen last
        self._view: NodeView | None = _UNKNOWN  # None: something has changed since
        self._picks = self._requests_since = self._tokens_since = 0
        self._backlog = Backlog()

    @property
    def name(self) -> str:
        return self.status.info.name or self.address

    @property
    def incarnation(self) -> int:
        return self.status.info.incarnation

    @property
    def model(self) -> tuple[str, ...]:
        """Architecture and digests: requests continue only on nodes that are equal in all of them."""
        return _model(self.status.info)

    @property
    def cache_kind(self) -> tuple[str, int]:
        """Nodes that are equal in it name equal blocks equally."""
        return self.status.info.cache_identity, self.status.info.cache_shape.block_size

    @property
    def open(self) -> bool:
        """Whether it may get new requests."""
        return self.reachable and not (self.detail or self.status.draining or self.retired)

    @property
    def never_connected(self) -> bool:
        return self.detail == _NEVER_CONNECTED

    def view(self) -> NodeView:
        view = self._view
        if view is None or view.open != self.open:
            view = self._view = replace(
                _to_view(self.address, self.status, self.peers),
                open=self.open,
                requests_since=self._requests_since,
                tokens_since=self._tokens_since,
                picks=self._picks,
            )
            _ = view.queue_s  # computed once, not in each copy of the view
        return view

    def queue_s(self, now_s: float) -> float:
        """Predicted time until a prompt that is sent now would be computed."""
        return self._backlog.at(now_s)

    def note_prompt(self, start: int, stop: int, now_s: float) -> None:
        """It will compute these tokens of a prompt."""
        self._backlog.add(prompt_s(self.view(), start, stop), now_s)

    def note_sent(self, num_tokens: int, *, cached_tokens: int = 0) -> None:
        """A request has been sent to it, of which it has `cached_tokens` already."""
        self._picks += 1
        self._requests_since += 1
        self._tokens_since += num_tokens - cached_tokens
        self._view = None

    def take_status(self, status: node_pb2.NodeStatus, detail: str) -> None:
        self.status = status
        self.peers = {peer.incarnation: peer for peer in status.peers if peer.incarnation}
        self.reachable, self.detail = True, detail
        self._requests_since = self._tokens_since = 0
        self._view = None
        self._backlog.reported(_seconds(status.backlog_s), self.last_message_at_s)

    def take_peer(self, state: common_pb2.PeerState) -> None:
        if state.incarnation:
            self.peers[state.incarnation] = state
            self._view = None

    def explain(self) -> str:
        """Why it is not chosen for a request."""
        if self.detail:
            return f"{self.name} cannot be used ({self.detail})"
        if self.status.draining:
            return f"{self.name} is draining"
        refused = [
            f"{peer.name} refused ({', '.join(item.field for item in peer.mismatches)})"
            for peer in self.peers.values()
            if peer.mismatches
        ]
        return f"{self.name}: {', '.join(refused)}" if refused else f"{self.name} is available"


class Fleet:
    """All nodes.

    Args:
        model: name, architecture and config digest of the model that this gateway serves.
        max_context_tokens: the model's own limit.
        policy: where prompts may be prefilled.
    """

    def __init__(self, model: common_pb2.ModelIdentity, max_context_tokens: int, policy: LocalPolicy) -> None:
        self.prefills: dict[str, FleetNode] = {}  # by address
        self.decodes: dict[str, FleetNode] = {}
        self._model = model
        self._max_context_tokens = max_context_tokens
        self._policy = policy
        self._index = PrefixIndex()
        self._affinity = Affinity()

    # ---- recording

    def add(self, role: Role, address: str) -> FleetNode:
        """Adds a node at a new address."""
        node = self._of(role)[address] = FleetNode(role, address)
        return node

    def remove(self, role: Role, address: str) -> None:
        del self._of(role)[address]
        self._index.forget(address)

    def status_received(
        self, role: Role, address: str, status: node_pb2.NodeStatus, now_s: float
    ) -> list[FleetCommand]:
        """Records a node's status."""
        node = self._of(role)[address]
        node.last_message_at_s = now_s
        info = status.info
        if info.role != role:
            return self._wrong_role(node, info.role)
        foreign = self._foreign(info.model)
        commands: list[FleetCommand] = []
        restarted = info.incarnation != node.incarnation
        if restarted or not node.reachable:
            shape = info.cache_shape
            commands.append(LogLine(f"{info.name}: connected, {address}, KV {shape.layout} x {shape.block_size}"))
            if foreign:
                commands.append(LogLine(f"{info.name} gets no requests: {foreign}", warning=True))
        if restarted:
            commands += _drop_session(node, "it was restarted")
            self._forget_cache(node)
        node.take_status(status, foreign)
        return commands

    def lost(self, role: Role, address: str, reason: str) -> list[FleetCommand]:
        """Marks a node that is silent, or whose connection broke, as unreachable until its next status."""
        node = self._of(role)[address]
        commands: list[FleetCommand] = []
        if node.reachable:
            commands.append(LogLine(f"{node.name}: lost, {reason}", warning=True))
        elif node.never_connected:
            commands.append(LogLine(f"{address}: unreachable, retrying: {reason}", warning=True))
        node.reachable, node.detail = False, reason
        self._forget_cache(node)
        return [*commands, *_drop_session(node, reason)]

    def message_received(self, role: Role, address: str, now_s: float) -> None:
        """Records a sign of life: a message on any connection of the node."""
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

    def pick_decode(self, wanted: Wanted) -> FleetNode | None:
        """The decode node that fits the request best, or None."""
        role = common_pb2.ROLE_DECODE
        prefills = [node.view() for node in self.prefills.values()]
        picked = pick_decode(self.views(role, wanted), prefills, self._of_session(wanted, role))
        return None if picked is None else self._picked(role, picked, wanted)

    def place(self, wanted: Wanted, now_s: float) -> Placement | None:
        """The decode node for a request, and where its prompt is prefilled; None: no decode node can take it."""
        role = common_pb2.ROLE_DECODE
        decodes = self._views_at(role, wanted, now_s)
        prefills = self._views_at(common_pb2.ROLE_PREFILL, wanted, now_s)
        placement = place(decodes, prefills, self._of_session(wanted, role))
        if placement is not None:
            self._picked(role, placement.decode, wanted)
        return placement

    def pick_prefill(self, decode: FleetNode, wanted: Wanted) -> FleetNode | None:
        """The prefill node, paired with the decode node, that fits the request best, or None."""
        role = common_pb2.ROLE_PREFILL
        picked = pick_prefill(self.views(role, wanted), decode.view(), self._of_session(wanted, role))
        return None if picked is None else self._picked(role, picked, wanted)

    def views(self, role: Role, wanted: Wanted) -> list[NodeView]:
        """All nodes of a role, with how much of the request's prompt their caches have."""
        nodes = self._of(role)
        cached = self._cached_tokens(nodes.values(), wanted)
        return [
            node.view().with_cached(cached[address]) if address in cached else node.view()
            for address, node in nodes.items()
        ]

    def look_ahead(self, request: Request) -> Iterator[None]:
        """Hashes as much of the prompt as the choice of its nodes will need, some at each step."""
        if request.blocks is None or request.sampling.prompt_logprobs is not None:
            return
        for identity, block_size in {node.cache_kind for node in self.nodes() if node.cache.known}:
            yield from self._index.look_ahead(request.blocks.numbers(identity, block_size))

    def _views_at(self, role: Role, wanted: Wanted, now_s: float) -> list[NodeView]:
        views = zip(self._of(role).values(), self.views(role, wanted), strict=True)
        return [view.with_queue(node.queue_s(now_s)) for node, view in views]

    def _cached_tokens(self, nodes: Iterable[FleetNode], wanted: Wanted) -> dict[str, int]:
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

    def _of_session(self, wanted: Wanted, role: Role) -> Wanted:
        if not wanted.session_id:
            return wanted
        return replace(wanted, session_node=self._affinity.node(wanted.session_id, role))

    def _picked(self, role: Role, view: NodeView, wanted: Wanted) -> FleetNode:
        self._affinity.note(wanted.session_id, role, view.address)
        node = self._of(role)[view.address]
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

    def serves(self) -> bool:
        """Whether a request could be served now."""
        if self._policy is not LocalPolicy.STRICT:
            return any(node.open for node in self.decodes.values())
        return any(
            decode.incarnation in prefill.view().ready_peers
            for prefill, decode in self.reachable_pairs()
            if prefill.open and decode.open
        )

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that some decode node can hold; the model's own limit while none is known."""
        known = [node.view().max_context_tokens for node in self.decodes.values() if not node.detail]
        return min(self._max_context_tokens, max(known, default=self._max_context_tokens))

    def explain(self) -> str:
        """Why no node can be chosen for a request, node by node."""
        return "; ".join(node.explain() for node in self.nodes()) or "no node address is known"

    def loads(self) -> list[generation_pb2.NodeLoad]:
        """How full each reachable node is."""
        return [
            generation_pb2.NodeLoad(
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

    def report(self) -> list[generation_pb2.NodeReport]:
        reports = []
        for node in self.nodes():
            report = generation_pb2.NodeReport(
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
        return self.prefills if role == common_pb2.ROLE_PREFILL else self.decodes

    def _forget_cache(self, node: FleetNode) -> None:
        node.cache = CachePosition()
        self._index.forget(node.address)

    def _wrong_role(self, node: FleetNode, role: Role) -> list[FleetCommand]:
        wrong = f"it is a {_role_name(role)} node, not a {_role_name(node.role)} node"
        if node.detail == wrong:
            return []
        node.reachable, node.detail = False, wrong
        self._forget_cache(node)
        return [LogLine(f"{node.address} is not used: {wrong}", warning=True), *_drop_session(node, wrong)]

    def _foreign(self, theirs: common_pb2.ModelIdentity) -> str:
        """Why the node cannot serve this gateway's model; empty when it can."""
        ours = self._model
        if theirs.config_digest == ours.config_digest:
            return ""
        return (
            f"it serves {theirs.name} ({theirs.architecture}, config digest {theirs.config_digest[:12]}), this gateway "
            f"{ours.name} ({ours.architecture}, config digest {ours.config_digest[:12]}); start both with one model"
        )


def _drop_session(node: FleetNode, reason: str) -> list[FleetCommand]:
    return [DropSession(node.address, reason)] if node.role == common_pb2.ROLE_DECODE else []


def _role_name(role: Role) -> str:
    if role not in common_pb2.Role.values():
        return f"role {role}"  # of a newer version
    return common_pb2.Role.Name(role).removeprefix("ROLE_").lower()


def _model(info: common_pb2.NodeInfo) -> tuple[str, ...]:
    return (info.model.architecture, info.model.config_digest, info.model.weights_digest)


def _seconds(reported: float) -> float:
    """A node's number, or 0 if it is none."""
    return reported if 0 <= reported < math.inf else 0.0


def _to_view(address: str, status: node_pb2.NodeStatus, peers: Mapping[int, common_pb2.PeerState]) -> NodeView:
    info = status.info
    ready = (number for number, peer in peers.items() if peer.phase == common_pb2.PEER_PHASE_READY)
    return NodeView(
        address=address,
        incarnation=info.incarnation,
        model=_model(info),
        open=True,
        max_context_tokens=info.max_context_tokens,
        block_size=info.cache_shape.block_size,
        blocks_free=status.blocks_free,
        requests=status.requests_running + status.requests_waiting,
        tokens_waiting=status.tokens_waiting,
        ready_peers=frozenset(ready),
        costs=costs_from_proto(status.step_costs),
        backlog_s=_seconds(status.backlog_s),
        decode_rows=status.decode_rows,
        context_tokens=status.context_tokens,
        max_batch_requests=status.max_batch_requests,
        max_batch_tokens=status.max_batch_tokens,
        kv_bytes_per_token=_kv_bytes_per_token(info.cache_spec),
        peer_bytes_per_s={number: 1e9 * peer.gigabytes_per_s for number, peer in peers.items()},
    )


def _kv_bytes_per_token(spec: common_pb2.CacheSpec) -> int:
    """Of all layers, as if none had a sliding window."""
    per_head = spec.head_dim * _DTYPE_BYTES.get(spec.dtype, 2) * (1 if spec.kind == common_pb2.KV_KIND_MLA else 2)
    return spec.num_layers * spec.num_kv_heads * per_head
