"""Picks a decode node and a prefill node for one request. Pure: reports of nodes in, a choice out.

Nodes report at intervals. What this gateway has sent since the last report is added, so that a burst spreads.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from baton.costs import StepCosts
from baton.types import NO_SLO, LocalPolicy, Slo


@dataclass(frozen=True)
class NodeView:
    """What the choice needs of one node. `open`: it can be reached and takes new requests."""

    address: str
    incarnation: int
    model: tuple[str, ...]
    open: bool
    max_context_tokens: int
    block_size: int
    blocks_free: int
    requests: int  # running and waiting
    tokens_waiting: int
    ready_peers: frozenset[int]  # incarnations
    requests_since: int = 0  # sent by this gateway since the report
    tokens_since: int = 0
    picks: int = 0  # by this gateway, ever: spreads requests over idle nodes
    costs: StepCosts | None = None  # None: not measured yet
    backlog_s: float = 0.0  # predicted time for all prompt tokens that wait
    waiting_s: float = 0.0  # the same now: with what this gateway has sent since, less the time that has passed
    decode_rows: int = 0
    context_tokens: int = 0  # keys that one token of every decoding request reads
    max_batch_requests: int = 0  # 0: not known
    max_batch_tokens: int = 0
    cached_tokens: int = 0  # of this request's prompt, as far as this gateway knows the node's cache
    kv_bytes_per_token: int = 0
    # Of a prefill node: measured speeds of its pairs, by the decode node's incarnation.
    peer_bytes_per_s: Mapping[int, float] = field(default_factory=dict, hash=False)

    @property
    def load(self) -> int:
        return self.requests + self.requests_since

    def has_room(self, num_tokens: int) -> bool:
        return self.blocks_free * self.block_size >= num_tokens + self.tokens_since


@dataclass(frozen=True)
class Wanted:
    """What one request needs of its nodes.

    Args:
        num_tokens: prompt and output so far.
        model: identity of the node that it began on; None before it began.
        excluded_decode, excluded_prefill: incarnations that may not be chosen.
        slo: `ttft_s` is the time left until the first token is due.
        splittable: the prompt may be computed in two parts.
    """

    num_tokens: int
    policy: LocalPolicy
    model: tuple[str, ...] | None = None
    excluded_decode: Set[int] = frozenset()
    excluded_prefill: Set[int] = frozenset()
    slo: Slo = NO_SLO
    splittable: bool = True


def pick_decode(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: Wanted) -> NodeView | None:
    """The decode node for the request: with room, with a prefill node where that matters, then the least loaded."""

    def paired(node: NodeView) -> bool:
        return pick_prefill(prefills, node, wanted) is not None

    def cost(node: NodeView) -> tuple[object, ...]:
        unpaired = wanted.policy is LocalPolicy.PREFER and not paired(node)
        return (not node.has_room(wanted.num_tokens + 1), unpaired, node.load, node.picks, node.address)

    usable = usable_decodes(decodes, wanted)
    if wanted.policy is LocalPolicy.STRICT:
        usable = [node for node in usable if paired(node)]
    return _cheapest(usable, cost)


def usable_decodes(decodes: Sequence[NodeView], wanted: Wanted) -> list[NodeView]:
    """The decode nodes that could take the request, with or without room."""
    return [node for node in decodes if _can_take(node, wanted) and node.incarnation not in wanted.excluded_decode]


def pick_prefill(prefills: Sequence[NodeView], decode: NodeView, wanted: Wanted) -> NodeView | None:
    """The prefill node with the least to compute, of the nodes whose pair with the decode node is ready."""

    def cost(node: NodeView) -> tuple[object, ...]:
        return (node.tokens_waiting + node.tokens_since, node.load, node.picks, node.address)

    usable = [
        node
        for node in prefills
        if _can_take(node, wanted)
        and node.incarnation not in wanted.excluded_prefill
        and decode.incarnation in node.ready_peers
    ]
    return _cheapest(usable, cost)


def _can_take(node: NodeView, wanted: Wanted) -> bool:
    fits = node.max_context_tokens > wanted.num_tokens
    return node.open and fits and wanted.model in (None, node.model)


def _cheapest(nodes: Sequence[NodeView], cost: Callable[[NodeView], tuple[object, ...]]) -> NodeView | None:
    return min(nodes, key=cost, default=None)
