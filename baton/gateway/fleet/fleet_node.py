"""One node as this gateway knows it: its last status, its peers, and the work sent to it since. Pure.

A prefill node may also decode: it then serves whole requests, prompt and output, without a hand-over. It is still one
node with one status, backlog and prefix cache, but has two views: `view` for prompts that it computes for decode nodes,
and `decode_view` for requests that it serves alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from operator import is_
from typing import TypeAlias

from baton.core.costs import StepCosts
from baton.core.errors import shortened
from baton.core.limits import TOPOLOGY_LABELS_MAX
from baton.core.types import AdapterRef
from baton.gateway.core.shared_sends import NodeSends
from baton.gateway.fleet.cache_position import CachePosition
from baton.gateway.fleet.node_costs import DECODE_STEP, PROMPT_STEP, NodeCosts
from baton.gateway.fleet.node_report import (
    SETTLED,
    has_requests,
    kept_kind,
    load_of,
    refuses_for_good,
    shared_store,
    to_view,
)
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.pair_choice import Candidate
from baton.gateway.fleet.prediction import prompt_s
from baton.gateway.fleet.second_token import SecondTokenDelay
from baton.gateway.fleet.unreported_work import UnreportedWork
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_from_proto, describe_loading
from baton.rpc.revisions import revision_of

Role: TypeAlias = node_status_pb2.Role.ValueType

_TEXT_MAX = 200
_NEVER_CONNECTED = "not connected yet"
_UNKNOWN = NodeView("", 0, "", False, 0, 1, 0, 0, 0, frozenset())


class FleetNode:
    """One node: its last status, its peers, and the work that this gateway has sent to it since that status.

    Args:
        role: role in which the node is used.
        listed: role of the address list that contains the node.
        choices: counter of node choices, shared by all nodes.
        sends: what all processes of this gateway send to the node; None: there is only this process.

    Attributes:
        loading: whether the node is connected but does not serve yet; `detail` says what it is doing.
        claimed_incarnation: incarnation that reported this role although the list has the other one; 0: none.
        costs: step costs that the node reports, and their age.
        second_token: of hand-overs to the node.
    """

    def __init__(
        self, role: Role, address: str, listed: Role, choices: Iterator[int], sends: NodeSends | None = None
    ) -> None:
        self.role = role
        self.listed = listed
        self.claimed_incarnation = 0
        self.address = address
        self.reachable = self.loading = False
        self.detail = _NEVER_CONNECTED  # why the node cannot be used; empty if it can
        self.status = node_status_pb2.NodeStatus()
        self.incarnation = 0  # of `status`, kept because it is read often
        self.peers: dict[int, node_status_pb2.PeerState] = {}  # by incarnation; another dict after every change
        self.ready_peers: frozenset[int] = frozenset()  # incarnations
        self.refused: frozenset[int] = frozenset()  # incarnations that can never be its peers
        self._peer_bytes_per_s: dict[int, float] = {}
        self.last_message_at_s = 0.0  # time of the last changed status or message about a request
        self.retired = False  # no longer listed: removed once its requests are done
        self.cache = CachePosition()
        self.adapters: frozenset[AdapterRef] = frozenset()
        self.revision = ""  # of the node's weights; requests continue only on nodes of their revision; empty: unknown
        # What must be equal where nodes use each other's KV; None: it keeps none outside of its cache.
        self.kept_kind: tuple[object, ...] | None = None
        self.shared_store = b""  # equal where nodes read each other's KV in one store; empty: it shares none
        self.cached_tokens = 0  # cached part of the prompt for which the node was last chosen
        self._view: NodeView | None = _UNKNOWN  # None: outdated
        self._decode_view: NodeView | None = None
        self.costs = NodeCosts(PROMPT_STEP if role == node_status_pb2.ROLE_PREFILL else DECODE_STEP)
        self.second_token = SecondTokenDelay()
        self._costs: StepCosts | None = None  # used to choose the node, see `use_costs`
        self._choices = choices
        self._sends = sends
        self._work = UnreportedWork(sends, decodes=role == node_status_pb2.ROLE_DECODE)
        self._last_choice = 0
        self._candidate_state: tuple[object, ...] = (None,) * 5
        self._candidate = Candidate(address, 0, "", open=False, reachable=False)
        # Answers to Connect calls since the last status, and whether `peers` has any that no status has.
        self._answers: dict[int, node_status_pb2.PeerState] = {}
        self._peers_answered = False

    @property
    def name(self) -> str:
        return self.status.info.name or self.address

    @property
    def revision_name(self) -> str:
        return shortened(self.status.info.model.revision_name, _TEXT_MAX)

    @property
    def version(self) -> str:
        return shortened(self.status.info.package_version, _TEXT_MAX)

    @property
    def serves(self) -> bool:
        """Whether the node works on requests; a draining node still does."""
        return self.reachable and not self.detail

    @property
    def cache_kind(self) -> tuple[str, int]:
        """Cache identity and block size. Nodes of one kind have equal numbers for equal blocks."""
        return self.status.info.cache_identity, self.status.info.cache_shape.block_size

    @property
    def also_decodes(self) -> bool:
        """Whether this is a prefill node that also serves whole requests."""
        return self.role == node_status_pb2.ROLE_PREFILL and self.status.info.also_decodes

    @property
    def open(self) -> bool:
        """Whether the node may get new requests."""
        return self.reachable and not (self.detail or self.status.draining or self.retired)

    @property
    def candidate(self) -> Candidate:
        """What the choice of pairs needs to know about the node."""
        state = self.status, self.reachable, self.detail, self.retired, self.refused
        if not all(map(is_, state, self._candidate_state)):
            may_take = self.open if self.reachable else not self.retired
            self._candidate_state = state
            self._candidate = Candidate(
                self.address,
                self.incarnation,
                self.revision,
                may_take,
                self.reachable,
                self.adapters,
                self.refused,
                self._topology,
            )
        return self._candidate

    @property
    def _topology(self) -> tuple[str, ...] | None:
        """The labels of where the node is. None: it has never sent a status."""
        info = self.status.info
        return tuple(info.topology[:TOPOLOGY_LABELS_MAX]) if info.name else None

    @property
    def expected(self) -> bool:
        """Whether the node is reachable or probably will be soon."""
        return self.reachable or self.loading or self.never_connected

    @property
    def unconfirmed(self) -> bool:
        """Whether requests were sent to the node since its last status."""
        return self._work.requests > 0

    @property
    def never_connected(self) -> bool:
        return self.detail == _NEVER_CONNECTED

    def view(self) -> NodeView:
        """The view of the node in its role."""
        work = self._work
        if work.count_others():
            self._view = None
        view = self._view
        if view is None or view.open != self.open:
            view = self._view = replace(
                to_view(self.address, self.revision, self.status, self._costs),
                open=self.open,
                ready_peers=self.ready_peers,
                peer_bytes_per_s=self._peer_bytes_per_s,
                adapters=self.adapters,
                requests_since=work.requests,
                streams_since=work.requests - work.prompts,
                tokens_since=work.tokens,
                room_tokens=work.room_tokens,
                turn=self._last_choice,
                name=self.name,
            )
            _ = view.queue_s  # cached here, so that copies of the view do not compute it again
            self._decode_view = None
        return view

    def decode_view(self) -> NodeView:
        """The view of the node as one that decodes. A prefill node decodes alone, so this view has no peers."""
        view = self.view()
        if self.role == node_status_pb2.ROLE_DECODE:
            return view
        if self._decode_view is None:
            self._decode_view = replace(view, also_prefills=True, ready_peers=frozenset())
            _ = self._decode_view.queue_s
        return self._decode_view

    def queue_s(self, now_s: float) -> float:
        """Predicted wait of a prompt that is sent now."""
        return self._work.queue_s(now_s)

    def note_prompt(self, start: int, stop: int, now_s: float) -> None:
        """Adds the prompt tokens from `start` to `stop`, which the node will compute, to its backlog."""
        self._work.add_prompt(prompt_s(self.view(), start, stop), now_s)

    def note_sent(self, num_tokens: int, *, cached_tokens: int = 0, decodes: bool = True) -> None:
        """Records that a request was sent to the node, which has cached `cached_tokens` of its tokens.

        Args:
            decodes: whether the request also decodes there.
        """
        self._last_choice = next(self._choices)
        self._work.add_request(num_tokens, cached_tokens=cached_tokens, decodes=decodes)
        self._view = None

    def use_costs(self, costs: StepCosts | None) -> None:
        """Sets the step costs by which the node is chosen."""
        if costs is not self._costs:
            self._costs, self._view = costs, None

    def take_status(self, status: node_status_pb2.NodeStatus, detail: str, now_s: float) -> None:
        """Records a status of a reachable node; `detail` says why it cannot be used, "" if it can."""
        before = self.status
        started = before.info.incarnation != status.info.incarnation
        works = has_requests(status)
        if started:
            self._forget_process(status.info.incarnation)
        self.costs.report(
            self._costs_of(status, "step_costs", None if started else self.costs.reported),
            self._costs_of(status, "step_profile", None if started else self.costs.profile),
            kind=(self.role, status.info.also_decodes, status.info.tensor_parallel_size, status.max_batch_tokens),
            works=works or (not started and status.requests_total > before.requests_total),
            now_s=now_s,
        )
        self.revision = revision_of(status.info.model)
        self.adapters = frozenset(AdapterRef(each.name, each.revision) for each in status.adapters)
        self.status, self.incarnation = status, status.info.incarnation
        self.kept_kind, self.shared_store = kept_kind(status), shared_store(status)
        if started or self._peers_answered or status.peers != before.peers or before.HasField("loading"):
            peers = {peer.incarnation: peer for peer in status.peers if peer.incarnation}
            newer = self._answers_newer_than(peers)
            self._take_peers(peers | newer)
            self._answers, self._peers_answered = {}, bool(newer)
        self.reachable, self.loading, self.detail = True, False, detail
        self._work.reported(status, now_s)
        self._view = None

    def _forget_process(self, incarnation: int) -> None:
        """Forgets what another process of the node had or taught, at the first status of a new one."""
        self.refused, self.costs = frozenset(), NodeCosts(self.costs.typical)
        self._answers, self._peers_answered = {}, False
        self._take_peers({})
        shared = None if self._sends is None else self._sends.learned
        self.second_token = SecondTokenDelay(incarnation, shared)

    def _costs_of(self, status: node_status_pb2.NodeStatus, field: str, known: StepCosts | None) -> StepCosts | None:
        """The step costs in a field of the status: those that are known, if the last status had the same."""
        message = getattr(status, field)
        same = known is not None and status is not self.status and message == getattr(self.status, field)
        return known if same else costs_from_proto(message)

    def take_loading(self, status: node_status_pb2.NodeStatus) -> None:
        """Records a status of a node that has started but does not serve yet."""
        if status.info.incarnation != self.incarnation:
            self._forget_process(status.info.incarnation)
        self.status, self.incarnation = status, status.info.incarnation
        self.reachable, self.loading, self.detail = False, True, describe_loading(status.loading)
        self._view = None

    def take_loss(self, reason: str) -> None:
        """Marks the node as unreachable."""
        self.status.ClearField("loading")
        self.reachable, self.loading, self.detail = False, False, reason

    def take_peer(self, state: node_status_pb2.PeerState) -> None:
        """Records the node's answer to a Connect call. It counts until the node's next status, which may be older."""
        if state.incarnation:
            self._take_peers({**self.peers, state.incarnation: state})
            self._answers[state.incarnation] = state
            self._peers_answered = True
            self._view = None

    def _answers_newer_than(self, peers: dict[int, node_status_pb2.PeerState]) -> dict[int, node_status_pb2.PeerState]:
        """Answers with ready pairs that a status has as still connecting. The node may have sent it before the answer;
        otherwise the next status says the same."""
        connecting = {number for number, peer in peers.items() if peer.phase == node_status_pb2.PEER_PHASE_CONNECTING}
        ready = node_status_pb2.PEER_PHASE_READY
        return {
            number: answer for number, answer in self._answers.items() if answer.phase == ready and number in connecting
        }

    def _take_peers(self, peers: dict[int, node_status_pb2.PeerState]) -> None:
        self.peers = peers
        ready = (number for number, peer in peers.items() if peer.phase == node_status_pb2.PEER_PHASE_READY)
        self.ready_peers = frozenset(ready)
        self._peer_bytes_per_s = {number: 1e9 * peer.gigabytes_per_s for number, peer in peers.items()}
        # NOTE: a node lists only its latest refused peers, and those that are gone from its list would be asked again.
        refused = {number for number, peer in peers.items() if refuses_for_good(peer)}
        if not refused <= self.refused:
            self.refused |= refused

    def take_description(self, status: node_status_pb2.NodeStatus, now_s: float) -> None:
        """Records a status that the node was asked for. It counts only if its load is as in the last status; otherwise
        a later one is on its way."""
        if self.reachable and load_of(status) == load_of(self.status):
            self.take_confirmation(now_s)

    def confirms(self, status: node_status_pb2.NodeStatus, detail: str) -> bool:
        """Whether the status of the reachable node says nothing new, except that it has all requests sent before."""
        known = self.reachable and self.detail == detail and not self._peers_answered
        return known and status == self.status

    def take_confirmation(self, now_s: float) -> None:
        """Records that the last status is true still: requests sent since have not changed the node's load."""
        if self._work.requests:
            self._view = None
        self._work.reported(self.status, now_s)
        self.costs.still(works=has_requests(self.status), now_s=now_s)


def settled(prefill: FleetNode, decode: FleetNode) -> bool:
    """Whether the pair is ready or refused."""
    peer = prefill.peers.get(decode.incarnation)
    return decode.incarnation in prefill.refused if peer is None else peer.phase in SETTLED
