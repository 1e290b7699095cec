"""Picks a decode node and a prefill node for one request. Pure: reports of nodes in, a choice out.

Nodes report at intervals. What this gateway has sent since the last report is added, so that a burst spreads. Where
all nodes have measured what their steps cost, times are compared; else counts of tokens and requests.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from baton.core.costs import StepCosts, chunk_pairs
from baton.core.types import NO_SLO, AdapterRef, LocalPolicy, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks

_STEP_TOKENS = 2048  # of a node that does not report its step size
# Times this close count as equal: measured costs of equal nodes differ a little, and the fastest shall not get all.
_EQUAL_FACTOR, _EQUAL_S = 1.05, 1e-3
# Without an SLO, a second of a node's work weighs as much as this many seconds of waiting: what another node computes
# again also takes the place of other prefixes there. Of 1 to 100, 3 has the best mean TTFT on Mooncake's trace.
_WORK_WEIGHT = 3.0
# With an SLO, it weighs so much among the nodes that are soon enough.
_WORK_WEIGHT_IN_TIME = 20.0
# A node counts as soon enough within this share of it; predictions err, and the KV is still to be sent.
_SLO_SHARE = 0.5
# A session stays on its node while that takes at most so much longer.
_SESSION_FACTOR, _SESSION_S = 1.15, 5e-3
# To weigh a decode node's steps against KV that it has already: a typical output, and a fast network's transfer.
OUTPUT_TOKENS = 200
_TRANSFER_TOKEN_S = 5e-6


@dataclass(frozen=True)
class NodeView:
    """What the choice needs of one node. `open`: it can be reached and takes new requests."""

    address: str
    incarnation: int
    revision: str
    open: bool
    max_context_tokens: int
    block_size: int
    room_tokens: int  # of one more request, less those sent since the report: it finds blocks for so many
    requests: int  # running and waiting
    tokens_waiting: int
    ready_peers: frozenset[int]  # incarnations
    requests_since: int = 0  # sent by this gateway since the report
    tokens_since: int = 0  # that it must compute, of these requests
    turn: int = 0  # of this gateway's choices, when it last chose the node: equal nodes take turns
    costs: StepCosts | None = None  # None: not measured yet
    backlog_s: float = 0.0  # predicted time for all prompt tokens that wait
    decode_rows: int = 0
    context_tokens: int = 0  # keys that one token of every decoding request reads
    max_batch_requests: int = 0  # 0: not known
    max_batch_tokens: int = 0
    also_prefills: bool = False  # a prefill node that serves requests alone
    adapters: frozenset[AdapterRef] = frozenset()
    cached_tokens: int = 0  # of this request's prompt, as far as this gateway knows the node's cache
    kv_bytes_per_token: int = 0
    state_bytes: int = 0  # of a request's recurrent state
    # Of a prefill node: measured speeds of its pairs, by the decode node's incarnation.
    peer_bytes_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)
    name: str = ""

    @property
    def label(self) -> str:
        """For clients, which see names and no inner addresses."""
        return self.name or self.address

    @property
    def load(self) -> int:
        return self.requests + self.requests_since

    @cached_property
    def step_tokens(self) -> int:
        """Tokens of a prompt that one step computes."""
        return self.max_batch_tokens or _STEP_TOKENS

    @cached_property
    def step_s(self) -> float:
        """Predicted time of a whole step of a prompt, without attention; infinite without costs."""
        return inf if self.costs is None else self.costs.dense_s(self.step_tokens)

    @cached_property
    def queue_s(self) -> float:
        """Predicted time until a prompt that is sent now would be computed; infinite without costs."""
        return self.backlog_s + self.step_s / self.step_tokens * self.tokens_since if self.costs is not None else inf

    def prompt_s(self, start: int, stop: int) -> float:
        """Predicted time for a prompt's tokens alone, from `start` to `stop`; infinite without costs."""
        costs = self.costs
        if costs is None:
            return inf
        # As `StepCosts.prompt_s`, with what is equal for all requests computed once for each view.
        start = min(start, stop - 1)
        whole, rest = divmod(stop - start, self.step_tokens)
        dense_s = whole * self.step_s + (costs.dense_s(rest) if rest else 0.0)
        return dense_s + costs.pair_s * chunk_pairs(start, stop)

    def prefill_s(self, start: int, stop: int) -> float:
        """Predicted time until these tokens would be computed: what waits here comes first."""
        return self.queue_s + self.prompt_s(start, stop)

    def has_room(self, num_tokens: int) -> bool:
        return self.room_tokens >= num_tokens

    def with_cached(self, cached_tokens: int) -> "NodeView":
        """The same node for a prompt, with the number of its tokens that the node has.

        One of these is made for each node and request, so it copies the fields without checking them.
        """
        view = object.__new__(NodeView)
        view.__dict__.update(self.__dict__)
        view.__dict__["cached_tokens"] = cached_tokens
        return view

    def with_queue(self, queue_s: float) -> "NodeView":
        """The same node at a time after the report, when a prompt that is sent waits for so long."""
        view = object.__new__(NodeView)
        view.__dict__.update(self.__dict__)
        view.__dict__["queue_s"] = queue_s
        return view


@dataclass(frozen=True)
class RoutedRequest:
    """What one request needs of its nodes.

    Args:
        num_tokens: prompt and output so far.
        revision: of the weights that its tokens come from; empty while it has none.
        adapter: that nodes must have; None: the base model.
        excluded_decode, excluded_prefill: incarnations that may not be chosen.
        slo: `ttft_s` is the time left until the first token is due.
        splittable: the prompt may be computed in two parts.
        prompt: for `NodeView.cached_tokens`; None: nothing of the request may come from a prefix cache.
        session_id: empty where the client named none.
        session_nodes: addresses of the nodes that served the session last, one of each role.
    """

    num_tokens: int
    policy: LocalPolicy
    revision: str = ""
    adapter: AdapterRef | None = None
    excluded_decode: Set[int] = frozenset()
    excluded_prefill: Set[int] = frozenset()
    slo: Slo = NO_SLO
    splittable: bool = True
    prompt: PromptBlocks | None = None
    session_id: str = ""
    session_nodes: Set[str] = frozenset()


def decode_s(view: NodeView, wanted: RoutedRequest) -> float:
    """Predicted time of one decode step of this node with the request as one more row. Infinite while its costs are not
    known."""
    costs = view.costs
    if costs is None:
        return inf
    # As `StepCosts.seconds`, without the making of a StepWork for each node.
    rows = view.requests + view.requests_since + 1
    keys = view.context_tokens + view.tokens_since + wanted.num_tokens
    return costs.dense_s(rows) + costs.key_s * keys + costs.decode_row_s * rows


def pick_decode(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> NodeView | None:
    """The decode node for the request: with room and a seat, with a prefill node where that matters, then the one that
    would serve it soonest, or the least loaded one."""
    partners = _usable(prefills, wanted, wanted.excluded_prefill)
    usable = usable_decodes(decodes, wanted)
    if wanted.policy is LocalPolicy.STRICT:
        usable = _paired(usable, partners)
    usable = [node for node in usable if node.has_room(wanted.num_tokens + 1)] or usable
    if wanted.policy in (LocalPolicy.PREFER, LocalPolicy.ELASTIC):
        usable = _paired(usable, partners) or usable
    usable = [node for node in usable if not 0 < node.max_batch_requests <= node.load] or usable
    if all(node.costs is not None for node in usable):
        scores = [_decode_whole_s(node, wanted) for node in usable]
        return _least(usable, scores, wanted, lambda node: (node.load, node.turn, node.address))

    def cost(node: NodeView) -> tuple[object, ...]:
        return node.load, node.address not in wanted.session_nodes, -node.cached_tokens, node.turn, node.address

    return min(usable, key=cost, default=None)


def usable_decodes(decodes: Sequence[NodeView], wanted: RoutedRequest) -> list[NodeView]:
    """The decode nodes that could take the request, with or without room."""
    return _usable(decodes, wanted, wanted.excluded_decode)


def pick_prefill(prefills: Sequence[NodeView], decode: NodeView, wanted: RoutedRequest) -> NodeView | None:
    """A prefill node of those whose pair with the decode node is ready: of the nodes that are soon enough for the SLO,
    the one with the least work; if there are none, the soonest; without an SLO, the best of both.
    Without costs: the node with the least to compute."""
    usable = [
        node for node in _usable(prefills, wanted, wanted.excluded_prefill) if decode.incarnation in node.ready_peers
    ]
    if all(node.costs is not None for node in usable):
        return _least_work(usable, wanted)

    def cost(node: NodeView) -> tuple[object, ...]:
        tokens = node.tokens_waiting + node.tokens_since - node.cached_tokens
        return tokens, node.address not in wanted.session_nodes, node.load, node.turn, node.address

    return min(usable, key=cost, default=None)


def _usable(nodes: Sequence[NodeView], wanted: RoutedRequest, excluded: Set[int]) -> list[NodeView]:
    return [
        node
        for node in nodes
        if node.open
        and node.max_context_tokens > wanted.num_tokens
        and wanted.revision in ("", node.revision)
        and (wanted.adapter is None or wanted.adapter in node.adapters)
        and node.incarnation not in excluded
    ]


def _paired(decodes: list[NodeView], partners: list[NodeView]) -> list[NodeView]:
    """The decode nodes that some of the prefill nodes can send to."""
    first = partners[0].ready_peers if partners else frozenset()  # mostly of all decode nodes
    return [
        node
        for node in decodes
        if node.incarnation in first or any(node.incarnation in each.ready_peers for each in partners)
    ]


def _decode_whole_s(node: NodeView, wanted: RoutedRequest) -> float:
    """A measure of how long the request takes at a decode node once its prompt is computed."""
    missing = wanted.num_tokens - node.cached_tokens
    return OUTPUT_TOKENS * decode_s(node, wanted) + _TRANSFER_TOKEN_S * missing


def _least_work(nodes: Sequence[NodeView], wanted: RoutedRequest) -> NodeView | None:
    times_s = [node.prefill_s(node.cached_tokens, wanted.num_tokens) for node in nodes]
    ttft_s, weight = wanted.slo.ttft_s, _WORK_WEIGHT
    if ttft_s is not None:
        in_time = [place for place, s in enumerate(times_s) if s <= _SLO_SHARE * ttft_s]
        weight = _WORK_WEIGHT_IN_TIME if in_time else 1.0
        if in_time:
            nodes, times_s = [nodes[place] for place in in_time], [times_s[place] for place in in_time]
    scores = [s + (weight - 1.0) * (s - node.queue_s) for node, s in zip(nodes, times_s, strict=True)]
    return _least(nodes, scores, wanted, lambda node: (node.queue_s, node.load, node.turn, node.address))


def _least(
    nodes: Sequence[NodeView],
    scores: Sequence[float],
    wanted: RoutedRequest,
    tie: Callable[[NodeView], tuple[float | str, ...]],
) -> NodeView | None:
    """The session's node if its score is nearly the best; else, of those whose scores count as equal to the best, the
    one with the least `tie`."""
    best = min(scores, default=0.0)
    equal, of_session = best * _EQUAL_FACTOR + _EQUAL_S, best * _SESSION_FACTOR + _SESSION_S
    candidates = []
    for node, score in zip(nodes, scores, strict=True):
        if score <= of_session and node.address in wanted.session_nodes:
            return node
        if score <= equal:
            candidates.append(node)
    return min(candidates, key=tie, default=None)
