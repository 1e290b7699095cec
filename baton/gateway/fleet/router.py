"""Picks a decode node and a prefill node for one request. Pure: views of nodes in, a choice out.

If all nodes have measured their step costs, predicted times are compared, otherwise counts of tokens and requests.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from math import inf

from baton.core.types import DEFAULT_OBJECTIVE, NO_SLO, AdapterRef, LocalPolicy, Objective, Slo
from baton.gateway.core.prompt_blocks import PromptBlocks
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.route_overheads import NO_OVERHEADS, RouteOverheads

# Times this close count as equal: measured costs of equal nodes differ a little, and the fastest must not get all
# requests.
_EQUAL_FACTOR, _EQUAL_S = 1.05, 1e-3
# Without an SLO, a second of a node's work weighs as much as this many seconds of waiting: a prefix that another node
# computes again also evicts other prefixes there. Of 1 to 100, 3 has the best mean TTFT on Mooncake's trace.
_WORK_WEIGHT = 3.0
# With an SLO, the weight of work among the nodes that are soon enough.
_WORK_WEIGHT_IN_TIME = 20.0
# A node is soon enough within this share of the TTFT: predictions err, and the KV is still to be sent.
_SLO_SHARE = 0.5
# A session stays on its node while that takes at most this much longer.
_SESSION_FACTOR, _SESSION_S = 1.15, 5e-3
# A prefill node that is not a partner of the picked decode node must need less than this share of the partner's time.
_FAR_BETTER = 0.8
# Weigh a decode node's steps against the KV that it has cached: length of a typical output, and transfer time per token
# on a fast network.
OUTPUT_TOKENS = 200
_TRANSFER_TOKEN_S = 5e-6


@dataclass(frozen=True)
class RoutedRequest:
    """Requirements of one request on its nodes.

    Args:
        num_tokens: length of prompt and output so far.
        revision: revision of the weights that computed the output so far; empty: any.
        adapter: adapter that the nodes must have; None: the base model.
        excluded_decode: incarnations that must not decode.
        excluded_prefill: incarnations that must not prefill.
        slo: bounds of the request; `ttft_s` is the time left until the first token is due.
        objective: what the request gets where its SLO says nothing.
        splittable: whether the prompt may be computed in two parts.
        overheads: of the first token, beyond queues and steps.
        token_ratio: time per token on nodes that draft tokens, by that of their steps without drafts.
        typical_tokens: length of the prompts that make up most of the prompt work; 0: unknown, so this one's counts.
        prompt: block numbers for `NodeView.cached_tokens`; None: the request must not use a prefix cache.
        session_id: session of the request; empty: none.
        session_nodes: addresses of the nodes that served the session last, one of each role.
    """

    num_tokens: int
    policy: LocalPolicy
    revision: str = ""
    adapter: AdapterRef | None = None
    excluded_decode: Set[int] = frozenset()
    excluded_prefill: Set[int] = frozenset()
    slo: Slo = NO_SLO
    objective: Objective = DEFAULT_OBJECTIVE
    splittable: bool = True
    overheads: RouteOverheads = NO_OVERHEADS
    token_ratio: float = 1.0
    typical_tokens: int = 0
    prompt: PromptBlocks | None = None
    session_id: str = ""
    session_nodes: Set[str] = frozenset()


def decode_s(view: NodeView, wanted: RoutedRequest) -> float:
    """Predicted time of one decode step of this node with the request as one more row and without draft tokens;
    infinite without costs."""
    costs = view.costs
    if costs is None:
        return inf
    # Equals `StepCosts.seconds` without creating a StepWork for each node.
    rows = view.streams + 1
    keys = view.context_tokens + view.tokens_since + wanted.num_tokens
    return costs.dense_s(rows) + costs.key_s * keys + costs.decode_row_s * rows


def token_s(view: NodeView, wanted: RoutedRequest) -> float:
    """Predicted time per token of the request on this node, with the node's draft tokens."""
    return decode_s(view, wanted) * (1.0 if view.pace is None else wanted.token_ratio)


def mean_token_ratio(nodes: Sequence[NodeView]) -> float:
    """The `RoutedRequest.token_ratio` of these nodes; 1 while none of them drafts for a request.

    One number serves for all nodes that draft: how many drafts are accepted depends on the requests. Were it each
    node's own, an idle node would seem slower than a busy one, and equal nodes would differ by what their requests
    happen to say.
    """
    speculating = [(node.decode_rows, node.pace.token_ratio) for node in nodes if node.open and node.pace is not None]
    rows = sum([rows for rows, _ in speculating])
    return sum([rows * ratio for rows, ratio in speculating]) / rows if rows else 1.0


def pick_decode(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> NodeView | None:
    """Picks the decode node for the request. Returns None if no node is usable.

    Policy strict requires a paired prefill node. Nodes with room are preferred, then paired nodes unless the policy is
    local, then nodes with a free seat. Of these, the one with the shortest predicted output time is picked; without
    costs, the least loaded one.
    """
    partners = _usable(prefills, wanted, wanted.excluded_prefill)
    usable = usable_decodes(decodes, wanted)
    if wanted.policy is LocalPolicy.STRICT:
        usable = _paired(usable, partners)
    usable = [node for node in usable if node.has_room(wanted.num_tokens + 1)] or usable
    if wanted.policy in (LocalPolicy.PREFER, LocalPolicy.ELASTIC):
        usable = _paired(usable, partners) or usable
    usable = [node for node in usable if not 0 < node.max_batch_requests <= node.load] or usable
    if all(node.costs is not None for node in usable):
        scores = [_output_s(node, wanted) for node in usable]
        return _least(usable, scores, wanted, lambda node: (node.load, node.turn, node.address))

    def cost(node: NodeView) -> tuple[object, ...]:
        return node.load, node.address not in wanted.session_nodes, -node.cached_tokens, node.turn, node.address

    return min(usable, key=cost, default=None)


def usable_decodes(decodes: Sequence[NodeView], wanted: RoutedRequest) -> list[NodeView]:
    """The decode nodes that could take the request, now or once they have room."""
    return _usable(decodes, wanted, wanted.excluded_decode)


def pick_prefill(prefills: Sequence[NodeView], decode: NodeView, wanted: RoutedRequest) -> NodeView | None:
    """Picks a prefill node among those whose pair with the decode node is ready. Returns None if there is none.

    Among nodes that are soon enough for the TTFT, the work counts most; if none is, the soonest node is picked. Without
    a TTFT, both count. Without costs, the node with the fewest tokens to compute is picked.
    """
    usable = [
        node for node in _usable(prefills, wanted, wanted.excluded_prefill) if decode.incarnation in node.ready_peers
    ]
    if all(node.costs is not None for node in usable):
        return _least_work(usable, wanted)

    def cost(node: NodeView) -> tuple[object, ...]:
        tokens = node.tokens_waiting + node.tokens_since - node.cached_tokens
        return tokens, node.address not in wanted.session_nodes, node.load, node.turn, node.address

    return min(usable, key=cost, default=None)


def pick_pair(
    decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest
) -> tuple[NodeView | None, NodeView | None]:
    """Picks the decode node, then the best prefill node among its partners.

    Where not all nodes are paired with all, a prefill node that is not a partner may be far better, because it has the
    prompt in its cache or has no queue. The request then goes to it and to one of its own partners.
    """
    decode = pick_decode(decodes, prefills, wanted)
    if decode is None or wanted.policy is LocalPolicy.LOCAL:
        return decode, None
    prefill = pick_prefill(prefills, decode, wanted)
    others = [] if prefill is None else [node for node in prefills if decode.incarnation not in node.ready_peers]
    if prefill is None or not others:
        return decode, prefill
    best = _far_better(prefill, _usable(others, wanted, wanted.excluded_prefill), wanted)
    if best is None:
        return decode, prefill
    partner = pick_decode([node for node in decodes if node.incarnation in best.ready_peers], [best], wanted)
    if partner is None or not partner.has_room(wanted.num_tokens + 1):
        return decode, prefill
    if partner.costs is not None and decode.costs is not None and best.costs is not None:
        saved_s = prefill.prefill_s(prefill.cached_tokens, wanted.num_tokens)
        saved_s -= best.prefill_s(best.cached_tokens, wanted.num_tokens)
        is_better = _output_s(partner, wanted) - _output_s(decode, wanted) < saved_s
    else:
        is_better = partner.load <= decode.load + 1
    return (partner, best) if is_better else (decode, prefill)


def _far_better(prefill: NodeView, others: Sequence[NodeView], wanted: RoutedRequest) -> NodeView | None:
    """The best of the others if the prompt is computed far sooner there than on the picked node."""
    if all(node.costs is not None for node in (prefill, *others)):
        best = _least_work([prefill, *others], wanted)
        assert best is not None
        sooner_s = best.prefill_s(best.cached_tokens, wanted.num_tokens)
        own_s = prefill.prefill_s(prefill.cached_tokens, wanted.num_tokens)
        return best if sooner_s < _FAR_BETTER * own_s - _EQUAL_S else None

    def tokens(node: NodeView) -> int:
        return wanted.num_tokens + node.tokens_waiting + node.tokens_since - node.cached_tokens

    found = min(others, key=lambda node: (tokens(node), node.turn), default=None)
    return found if found is not None and tokens(found) < _FAR_BETTER * tokens(prefill) else None


def usable_prefills(prefills: Sequence[NodeView], wanted: RoutedRequest) -> list[NodeView]:
    """The prefill nodes that could compute the prompt, with or without a decode node."""
    return _usable(prefills, wanted, wanted.excluded_prefill)


def least_pooling(nodes: Sequence[NodeView], num_tokens: int) -> NodeView | None:
    """Picks the node on which so many tokens of short prompts are computed soonest. Returns None if there is none."""
    if all(node.costs is not None for node in nodes):
        scores = [node.queue_s + node.step_s / node.step_tokens * num_tokens for node in nodes]
        bound = min(scores, default=0.0) * _EQUAL_FACTOR + _EQUAL_S
        equal = [node for node, score in zip(nodes, scores, strict=True) if score <= bound]
        return min(equal, key=lambda node: (node.load, node.turn, node.address), default=None)
    return min(
        nodes,
        key=lambda node: (node.tokens_waiting + node.tokens_since, node.load, node.turn, node.address),
        default=None,
    )


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
    """The decode nodes that are paired with at least one of the prefill nodes."""
    first = partners[0].ready_peers if partners else frozenset[int]()
    if all(node.incarnation in first for node in decodes):  # usual where all are paired with all
        return decodes
    having = first.union(*(node.ready_peers for node in partners))
    return [node for node in decodes if node.incarnation in having]


def _output_s(node: NodeView, wanted: RoutedRequest) -> float:
    """Estimated time of transfer and output on a decode node after the prompt has been computed."""
    missing = wanted.num_tokens - node.cached_tokens
    return OUTPUT_TOKENS * token_s(node, wanted) + _TRANSFER_TOKEN_S * missing + node.load_s


def _least_work(nodes: Sequence[NodeView], wanted: RoutedRequest) -> NodeView | None:
    times_s = [node.prefill_s(node.cached_tokens, wanted.num_tokens) for node in nodes]
    ttft_s, weight = wanted.slo.ttft_s, _WORK_WEIGHT
    if ttft_s is not None:
        in_time = [index for index, s in enumerate(times_s) if s <= _SLO_SHARE * ttft_s]
        weight = _WORK_WEIGHT_IN_TIME if in_time else 1.0
        if in_time:
            nodes, times_s = [nodes[index] for index in in_time], [times_s[index] for index in in_time]
    scores = [s + (weight - 1.0) * (s - node.queue_s) for node, s in zip(nodes, times_s, strict=True)]
    return _least(nodes, scores, wanted, lambda node: (node.queue_s, node.load, node.turn, node.address))


def _least(
    nodes: Sequence[NodeView],
    scores: Sequence[float],
    wanted: RoutedRequest,
    tie: Callable[[NodeView], tuple[float | str, ...]],
) -> NodeView | None:
    """The session's node if its score is close to the best; otherwise the node with the lowest `tie` among those whose
    score counts as equal to the best."""
    best = min(scores, default=0.0)
    equal, of_session = best * _EQUAL_FACTOR + _EQUAL_S, best * _SESSION_FACTOR + _SESSION_S
    candidates = []
    for node, score in zip(nodes, scores, strict=True):
        if score <= of_session and node.address in wanted.session_nodes:
            return node
        if score <= equal:
            candidates.append(node)
    return min(candidates, key=tie, default=None)
