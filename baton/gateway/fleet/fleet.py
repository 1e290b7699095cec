"""The choice of nodes for requests, and what this gateway knows of all nodes. Pure: no clock, task or socket."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.core.request import Request
from baton.gateway.fleet.adapters import serving_adapters
from baton.gateway.fleet.fleet_node import FleetNode, settled
from baton.gateway.fleet.node_costs import current_costs
from baton.gateway.fleet.node_table import NodeTable
from baton.gateway.fleet.placement import Placement, place
from baton.gateway.fleet.router import NodeView, RoutedRequest, pick_prefill
from baton.protos.v1 import node_status_pb2, operations_pb2

_COSTS_EACH_S = 0.1  # nodes report about as often


class Affinity:
    """The last prefill and decode node of each session, for a bounded number of sessions.

    Args:
        max_sessions: beyond it the session that was quiet for longest is forgotten.
    """

    def __init__(self, max_sessions: int = 65536) -> None:
        self._max_sessions = max_sessions
        self._nodes: OrderedDict[str, dict[int, str]] = OrderedDict()

    def nodes(self, session_id: str) -> frozenset[str]:
        """The addresses of the nodes that served the session last."""
        return frozenset(self._nodes.get(session_id, {}).values())

    def note(self, session_id: str, role: int, address: str) -> None:
        """The session's request goes to this node."""
        if not session_id:
            return
        self._nodes.setdefault(session_id, {})[role] = address
        self._nodes.move_to_end(session_id)
        if len(self._nodes) > self._max_sessions:
            self._nodes.popitem(last=False)


class Fleet(NodeTable):
    """All nodes, and the choice among them.

    Args:
        model: name, architecture and config digest of the model that this gateway serves.
        max_context_tokens: the model's own limit.
        policy: where prompts may be prefilled.
    """

    def __init__(self, model: node_status_pb2.ModelIdentity, max_context_tokens: int, policy: LocalPolicy) -> None:
        super().__init__(model)
        self._max_context_tokens = max_context_tokens
        self._policy = policy
        self._affinity = Affinity()

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


def _at(view: NodeView, cached: Mapping[str, int], queue_s: float) -> NodeView:
    """The node as one request finds it."""
    return (view.with_cached(cached[view.address]) if view.address in cached else view).with_queue(queue_s)
