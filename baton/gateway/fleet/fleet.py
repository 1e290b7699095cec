"""All nodes that this gateway knows, and the choice of nodes for requests. Pure: no clock, task or socket."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf

from numpy.random import Generator, default_rng

from baton.core.kv_entries import KeptPrefix
from baton.core.types import AdapterRef, LocalPolicy
from baton.gateway.core.request import Request
from baton.gateway.core.shared_sends import SharedSends
from baton.gateway.core.shared_sessions import SharedSessions
from baton.gateway.fleet import explanation
from baton.gateway.fleet.adapters import serving_adapters
from baton.gateway.fleet.affinity import Affinity, OwnAffinity, SharedAffinity
from baton.gateway.fleet.cached_tokens import CachedTokens
from baton.gateway.fleet.fleet_node import FleetNode, Role, settled
from baton.gateway.fleet.node_costs import current_costs
from baton.gateway.fleet.node_table import NodeTable
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.pair_choice import Candidate, choose_pairs
from baton.gateway.fleet.placement import Placement, Route, place
from baton.gateway.fleet.possible_pulls import MUCH_MORE_TOKENS
from baton.gateway.fleet.prompt_lengths import PromptLengths
from baton.gateway.fleet.route_overheads import LearnedOverheads
from baton.gateway.fleet.router import RoutedRequest, least_pooling, pick_prefill, usable_prefills
from baton.gateway.fleet.shortlist import ALL_UP_TO, Candidates, shortlist
from baton.protos.v1 import node_status_pb2, operations_pb2
from baton.rpc.convert_node import ranks_from_proto

_CURE = "see `baton status`, and try again"
_COSTS_EACH_S = 0.1  # nodes report about as often
_COSTS_EACH_NODE_S = 1e-3  # in a large cluster: an update takes 40 us for each node


class Fleet(NodeTable):
    """All nodes, and the choice among them.

    Args:
        model: name, architecture and config digest of the model that this gateway serves.
        max_context_tokens: the model's limit.
        policy: policy on where prompts may be prefilled.
        generates: whether the model generates; one that only pools hidden states needs no decode node.
        random: draws nodes in large clusters; a different one for each gateway, so that they choose different nodes.
    """

    def __init__(
        self,
        model: node_status_pb2.ModelIdentity,
        max_context_tokens: int,
        policy: LocalPolicy,
        *,
        generates: bool = True,
        random: Generator | None = None,
    ) -> None:
        super().__init__(model)
        self._max_context_tokens = max_context_tokens
        self._policy = policy
        self._generates = generates
        self._affinity: Affinity = OwnAffinity()
        self._random = default_rng(0) if random is None else random
        self._lengths = PromptLengths()
        self.overheads = LearnedOverheads()
        self._costs_updated_at_s = -inf
        self._decode_of: Mapping[int, FleetNode] = {}  # decode nodes that have pairs, by incarnation
        self._pairs_of: tuple[list[FleetNode], list[FleetNode], list[Candidate], list[Candidate]] = [], [], [], []
        self._pairs: Sequence[tuple[FleetNode, FleetNode]] = ()

    def share(self, sends: SharedSends, sessions: SharedSessions) -> None:
        """Shares sessions, and what is sent to nodes, with the other processes of this gateway. Call it before nodes
        are added."""
        self._sends = sends
        self._affinity = SharedAffinity(sessions, lambda: (node.address for node in self.nodes()))

    # ---- choices for one request

    def place(self, wanted: RoutedRequest, now_s: float) -> Placement | None:
        """Chooses the node that decodes a request, and where its prompt is prefilled.

        Returns None if no node can take it.
        """
        wanted = replace(
            self._of_session(wanted), typical_tokens=self._lengths.typical, overheads=self.overheads.at(now_s)
        )
        self._update_costs(now_s)
        cached = self._cached_tokens(self.nodes(), wanted)
        everything = Candidates(self.prefills.values(), self.decodes.values())
        few = everything if len(everything.prefills) + len(everything.decodes) <= ALL_UP_TO else None
        placement = self._place(wanted, few or self._shortlist(wanted, cached, now_s), cached, now_s)
        if placement is None and few is None:
            placement = self._place(wanted, everything, cached, now_s)
        if placement is not None:
            self._picked(self.decoding_node(placement.decode), placement.decode, wanted)
            self._lengths.add(wanted.num_tokens - placement.computing.cached_tokens)
            overheads = wanted.overheads
            overhead_s = overheads.local_s if placement.route is Route.LOCAL else overheads.remote_s
            placement = replace(placement, overhead_s=overhead_s + placement.held_s)
        return placement

    def _place(
        self, wanted: RoutedRequest, candidates: Candidates, cached: CachedTokens, now_s: float
    ) -> Placement | None:
        decoding = [*candidates.decodes, *(node for node in candidates.prefills if node.also_decodes)]
        decodes = [cached.pulling_view(node.decode_view(), node, now_s) for node in decoding]
        prefills = [cached.pulling_view(node.view(), node, now_s).computing for node in candidates.prefills]
        return place(decodes, prefills, wanted)

    def _shortlist(self, wanted: RoutedRequest, cached: CachedTokens, now_s: float) -> Candidates:
        def soonest(node: FleetNode) -> tuple[bool, float]:
            view, known = node.view(), cached.get(node.address, 0)
            if view.costs is None:
                return True, view.tokens_waiting + view.tokens_since - known
            load_s = cached.outside.get(node.address, 0) * view.load_token_s
            load_s += cached.below.get(node.address, 0) * view.read_token_s
            return False, max(node.queue_s(now_s), load_s) + view.prompt_s(known, wanted.num_tokens)

        if not self._decode_of:
            self.pairs()
        return shortlist(self.prefills, self.decodes, self._decode_of, wanted, cached, soonest, self._random)

    def pick_prefill(
        self, decode: FleetNode, wanted: RoutedRequest, now_s: float, *, placed: int | None = None
    ) -> FleetNode | None:
        """Chooses the best prefill node among those paired with the decode node. Returns None if there is none.

        Args:
            placed: incarnation of the node that `place` chose, which is preferred while it is usable.
        """
        wanted = self._of_session(wanted)
        self._update_costs(now_s)
        partners = [node for node in self.prefills.values() if decode.incarnation in node.ready_peers]
        keeps = any(node.kept_kind is not None for node in partners)
        cached = self._cached_tokens(self.nodes() if keeps else partners, wanted)
        views = [cached.pulling_view(node.view(), node, now_s).computing for node in partners]
        first = [view for view in views if view.incarnation == placed]
        picked = pick_prefill(first, decode.view(), wanted) or pick_prefill(views, decode.view(), wanted)
        return None if picked is None else self._picked(self.prefills[picked.address], picked, wanted)

    def pick_pooling(self, wanted: RoutedRequest, num_tokens: int, now_s: float) -> FleetNode | None:
        """Chooses the prefill node that has computed these tokens soonest; of equal ones, the one with fewest requests.
        Returns None if none is usable.

        Args:
            wanted: `num_tokens` of the longest prompt.
            num_tokens: of all prompts.
        """
        views = usable_prefills(self.prefill_views(wanted, now_s), wanted)
        picked = least_pooling(views, num_tokens)
        return None if picked is None else self.prefills[picked.address]

    def prefill_views(self, wanted: RoutedRequest, now_s: float) -> list[NodeView]:
        """Current views of all prefill nodes, each with the number of prompt tokens that it has cached."""
        self._update_costs(now_s)
        cached = self._cached_tokens(self.prefills.values(), wanted)
        return [cached.view(node.view(), node, now_s) for node in self.prefills.values()]

    def _update_costs(self, now_s: float) -> None:
        """Updates the step costs of all nodes: costs of idle nodes age (`baton.gateway.fleet.node_costs`)."""
        if now_s - self._costs_at_s < _COSTS_EACH_S:
            return
        num_nodes = len(self.prefills) + len(self.decodes)
        if num_nodes > ALL_UP_TO and now_s - self._costs_updated_at_s < _COSTS_EACH_NODE_S * num_nodes:
            return
        self._costs_at_s = self._costs_updated_at_s = now_s
        nodes = [node for node in self.nodes() if node.serves]  # not those with another model
        for node, costs in zip(nodes, current_costs([node.costs for node in nodes]), strict=True):
            node.use_costs(costs)

    def decoding_nodes(self) -> Iterator[FleetNode]:
        """All nodes that can decode: decode nodes, then prefill nodes that also decode."""
        yield from self.decodes.values()
        yield from (node for node in self.prefills.values() if node.also_decodes)

    def decoding_node(self, view: NodeView) -> FleetNode:
        """The node behind one of the views that `place` chooses from."""
        return (self.prefills if view.also_prefills else self.decodes)[view.address]

    def look_ahead(self, request: Request) -> Iterator[None]:
        """Hashes the part of the prompt that the choice of nodes will need, a few blocks per step."""
        if request.blocks is None or request.sampling.prompt_logprobs is not None:
            return
        for identity, block_size in {node.cache_kind for node in self.nodes() if node.cache.known}:
            yield from self._index.look_ahead(request.blocks.numbers(identity, block_size))

    def _cached_tokens(self, nodes: Iterable[FleetNode], wanted: RoutedRequest) -> CachedTokens:
        return CachedTokens.find(self._index, nodes, wanted)

    def kept_elsewhere(self, node: FleetNode, wanted: RoutedRequest) -> KeptPrefix | None:
        """The node that has much more of a sequence than the one that is to compute it, and whose KV that one can use.
        Returns None if there is none."""
        if node.kept_kind is None or wanted.prompt is None:
            return None
        others = [each for each in self.nodes() if each is not node and each.kept_kind == node.kept_kind]
        others = [each for each in others if each.serves]
        if not others:
            return None
        cached = self._cached_tokens((node, *others), wanted)
        best = max(others, key=lambda each: cached.get(each.address, 0))
        tokens = cached.get(best.address, 0)
        if tokens < cached.get(node.address, 0) + MUCH_MORE_TOKENS:
            return None
        return KeptPrefix(best.address, best.incarnation, tokens, ranks_from_proto(best.status.info))

    def _of_session(self, wanted: RoutedRequest) -> RoutedRequest:
        if not wanted.session_id:
            return wanted
        return replace(wanted, session_nodes=self._affinity.nodes(wanted.session_id))

    def _picked(self, node: FleetNode, view: NodeView, wanted: RoutedRequest) -> FleetNode:
        self._affinity.note(wanted.session_id, node.role, node.address)
        node.cached_tokens = view.cached_tokens
        return node

    # ---- state of the fleet

    def pairs(self) -> Sequence[tuple[FleetNode, FleetNode]]:
        """The pairs of reachable nodes that are made before traffic; another object after every change."""
        prefills = [node for node in self.prefills.values() if node.expected]
        decodes = [node for node in self.decodes.values() if node.expected]
        chosen_of = prefills, decodes, [node.candidate for node in prefills], [node.candidate for node in decodes]
        if chosen_of != self._pairs_of:
            self._pairs_of = chosen_of
            self._decode_of = {node.incarnation: node for node in decodes if node.reachable}
            self._pairs = [(prefills[row], decodes[column]) for row, column in choose_pairs(*chosen_of[2:])]
        return self._pairs

    def pairs_under_way(self) -> bool:
        """Whether some pair of usable nodes is still being connected: neither ready nor refused."""
        return any(prefill.open and decode.open and not settled(prefill, decode) for prefill, decode in self.pairs())

    def nodes_load(self) -> bool:
        """Whether a node is still loading or is being reached for the first time."""
        return any(node.loading or node.never_connected for node in self.nodes())

    def nodes_expected(self, now_s: float, *, within_s: float, roles: Collection[Role] | None = None) -> bool:
        """Whether a node that is lacking may begin to serve soon: it loads, drains, or is being reached for the first
        time, or it was lost or removed less than `within_s` ago and may be restarting.

        Args:
            roles: the ones that lack a node; None: found by what generating a text needs and does not have.
        """
        if self.nodes_load():
            return True
        lacking = self._lacking_roles() if roles is None else roles
        draining = any(node.role in lacking and node.reachable and node.status.draining for node in self.nodes())
        return draining or any(now_s - self._lost_at_s.get(role, -inf) < within_s for role in lacking)

    def _lacking_roles(self) -> Collection[Role]:
        """The roles that have no open node, where nothing can be generated; both, if nodes are there but no pair."""
        if self.serves():
            return ()
        tables = {node_status_pb2.ROLE_PREFILL: self.prefills, node_status_pb2.ROLE_DECODE: self.decodes}
        without = [role for role, nodes in tables.items() if not any(node.open for node in nodes.values())]
        return without or tuple(tables)

    def serves(self) -> bool:
        """Whether a request could be served now."""
        if not self._generates:
            return any(node.open for node in self.prefills.values())
        if self._policy is not LocalPolicy.STRICT:
            return any(node.open for node in self.decoding_nodes())
        open_decodes = {node.incarnation for node in self.decodes.values() if node.open}
        return any(not open_decodes.isdisjoint(node.ready_peers) for node in self.prefills.values() if node.open)

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that some decode node can hold; the model's limit while no node is known.

        Prefill nodes do not count: no decode node could continue a longer request that a prefill node began.
        """
        nodes = self.decodes if self._generates else self.prefills
        known = [node.view().max_context_tokens for node in nodes.values() if not node.detail]
        return min(self._max_context_tokens, max(known, default=self._max_context_tokens))

    def adapters(self) -> dict[str, AdapterRef]:
        """The adapters that requests can name as their model, by name."""
        return serving_adapters(self.nodes(), self.pairs())

    def may_have(self, revision: str, adapter: AdapterRef | None = None) -> bool:
        """Whether some node has, or may turn out to have, this revision of the weights, and the adapter."""
        return any(
            not node.revision or (node.revision == revision and (adapter is None or adapter in node.view().adapters))
            for node in self.nodes()
        )

    def explain(self, needs: Role | None = None) -> str:
        """Says why requests cannot be served, for clients; `needs`: they take a node of this role."""
        return explanation.explain(list(self.nodes()), self._lacking_role(needs))

    def cure(self, needs: Role | None = None) -> str:
        """What to do so that requests can be served, for clients; `needs`: they take a node of this role."""
        return "; ".join(filter(None, (explanation.cure(list(self.nodes()), self._lacking_role(needs)), _CURE)))

    def _lacking_role(self, needs: Role | None) -> Role | None:
        """The role that no open node has, though requests cannot be served without one."""
        prefill, decode = node_status_pb2.ROLE_PREFILL, node_status_pb2.ROLE_DECODE
        if needs is not None:
            return None if any(node.open and node.role == needs for node in self.nodes()) else needs
        strict = self._policy is LocalPolicy.STRICT
        if (strict or not self._generates) and not any(node.open for node in self.prefills.values()):
            return prefill
        decoding = self.decodes.values() if strict else self.decoding_nodes()
        return None if not self._generates or any(node.open for node in decoding) else decode

    def loads(self) -> list[operations_pb2.NodeLoad]:
        """The load of each reachable node."""
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
