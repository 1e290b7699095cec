"""Chooses where one request is computed: prompt and output on two nodes (remote), both on one node (local), or the
prompt on two nodes (split). Pure.

A dedicated prefill node computes prompts without pausing any stream, so prompts go there while it is free and the
decode node's steps are short. With a TTFT, one node of either role serves the whole request once prompts queue up
there, or once the gap between two tokens at a hand-over exceeds the TPOT, if its streams stay within their TPOT. If no
route meets the TTFT, the one with the earliest first token is chosen.

Without a TTFT, a weighted sum of first token and end decides. Either way, nodes keep the gaps of streams short, by the
TPOT or by the `Objective`, and the predictions count with that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import nsmallest

from baton.core.types import LocalPolicy, first_token_due_s
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.prediction import (
    LocalSteps,
    first_held_s,
    hand_over_s,
    leaves_time_for_prompts,
    local_steps,
    output_s,
    prefill_s,
    slower_s,
    transfer_s,
)
from baton.gateway.fleet.router import RoutedRequest, mean_token_ratio, pick_decode, pick_pair, usable_decodes

# Share of the TTFT that a first token from a prefill node may take before other routes are tried.
_PRESSED = 0.25
# Without a TTFT, one second until the first token weighs as much as this many seconds of the output.
_FIRST_WEIGHT = 3.0
# Without a TTFT, a prompt leaves a prefill node without streams only if that saves so much.
_MIN_SAVED_S = 0.02
# While a prefill node decodes an output, it computes so many prompts in the steps that this stream allows.
_PROMPTS_MET = 4
_SPLIT_MIN_TOKENS = 512  # a smaller part is not worth a transfer
_SPLITS_TRIED = 8
_NODES_TRIED = 3


class Route(Enum):
    """Route of a request through the nodes."""

    REMOTE = "remote"
    LOCAL = "local"
    SPLIT = "split"


@dataclass(frozen=True)
class Placement:
    """The nodes and the route for one request.

    Args:
        prefill: the prefill node; None for `Route.LOCAL`, or if it is chosen later.
        split_tokens: number of tokens that the prefill node computes for `Route.SPLIT`, a multiple of both block sizes.
        reason: of the choice, for the receipt.
        predicted_ttft_s: predicted time from now to the first token; None: unknown.
        meets: whether the prediction is within the TTFT; True without a TTFT or a prediction.
        held_s: part of the prediction in which the gateway holds the first token, see `second_token`.
        overhead_s: part of the prediction that is neither queueing nor a step, with `held_s`.
    """

    route: Route
    decode: NodeView
    prefill: NodeView | None
    split_tokens: int
    reason: str
    predicted_ttft_s: float | None
    meets: bool = True
    held_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def computing(self) -> NodeView:
        """The node that computes the prompt, or its first part."""
        return self.decode if self.prefill is None else self.prefill

    @property
    def why(self) -> str:
        """The reason, with the pull that the choice of a node alone counts on."""
        pull = self.decode.pull if self.route is Route.LOCAL and self.decode.pull_s else None
        return self.reason if pull is None else f"{self.reason}; {self.decode.label} {pull}"

    @property
    def prefill_pull(self) -> str:
        """The pull that the choice of the prefill node counts on, in words; empty: none."""
        return str(self.prefill.pull) if self.prefill is not None and self.prefill.pull_s else ""


def place(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement | None:
    """Chooses nodes and route for a request. Returns None if no node can take it.

    Args:
        decodes: decode nodes, and prefill nodes that serve requests alone (`NodeView.also_prefills`).
    """
    if (ratio := mean_token_ratio(decodes)) != 1.0:
        wanted = replace(wanted, token_ratio=ratio)
    paired = [node for node in decodes if not node.also_prefills]
    decode, prefill = pick_pair(paired, prefills, wanted)
    if decode is None:
        return _on_prefill_node([node for node in decodes if node.also_prefills], wanted)
    if wanted.policy is LocalPolicy.LOCAL:
        return _local_by_policy(decode, "the policy is local", wanted)
    if prefill is None:
        missing = f"is paired with {decode.label}" if any(node.open for node in prefills) else "is available"
        return _local_by_policy(decode, f"no prefill node {missing}", wanted)
    if prefill.costs is None:
        return Placement(Route.REMOTE, decode, prefill, 0, "", None)
    ttft_s = wanted.slo.ttft_s
    came_s = prefill_s(prefill, prefill.cached_tokens, wanted.num_tokens, wanted) + wanted.overheads.remote_s
    held_s = first_held_s(decode, wanted, came_s)
    meets = ttft_s is None or came_s <= ttft_s
    remote = Placement(Route.REMOTE, decode, prefill, 0, "", came_s + held_s, meets=meets, held_s=held_s)
    if wanted.policy is not LocalPolicy.ELASTIC or decode.costs is None:
        return remote
    usable = usable_decodes(decodes, wanted)
    if ttft_s is None:
        return _by_objective(remote, usable, wanted)
    return _within_ttft(remote, usable, ttft_s, wanted)


def _on_prefill_node(prefills: Sequence[NodeView], wanted: RoutedRequest) -> Placement | None:
    """Places the whole request on a prefill node that also decodes, when there is no decode node."""
    if wanted.policy is LocalPolicy.STRICT:
        return None
    node = pick_decode(prefills, [], wanted)
    return None if node is None else _local_by_policy(node, "no decode node is available", wanted)


@dataclass(frozen=True)
class _OnOneNode:
    """Prediction for a request that one node serves whole.

    Args:
        node: as the one that computes the prompt.
        receiver: the same node, as one that receives a part of the KV.
        ttft_s: time from now to the first token.
        end_s: time from now to the end of a typical output.
    """

    node: NodeView
    receiver: NodeView
    steps: LocalSteps
    ttft_s: float
    end_s: float


def _tried(nodes: Sequence[NodeView], decode: NodeView, wanted: RoutedRequest) -> list[NodeView]:
    """`decode` and the `_NODES_TRIED` least busy of the other nodes; the least recently chosen ones are first."""
    roomy = [node for node in nodes if node is not decode and node.has_room(wanted.num_tokens + 1)]
    roomy.sort(key=lambda node: node.turn)
    if len(roomy) > _NODES_TRIED:
        roomy = nsmallest(_NODES_TRIED, roomy, key=lambda node: node.queue_s + output_s(node, wanted))
    return [decode, *roomy]


def _on_one_node(each: NodeView, wanted: RoutedRequest, *, grows: bool = False) -> _OnOneNode | None:
    """The prediction for the node. Returns None if its costs are unknown or its streams leave no time."""
    node = each.computing
    steps = local_steps(node, wanted.num_tokens, wanted, waiting_s=node.wait_s, grows=grows)
    if steps is None:
        return None
    first_s = steps.ttft_s(node.wait_s, node.cached_tokens, wanted.num_tokens) + wanted.overheads.local_s
    return _OnOneNode(node, each, steps, first_s, first_s + output_s(node, wanted))


# ---- without a TTFT


def _by_objective(remote: Placement, usable: Sequence[NodeView], wanted: RoutedRequest) -> Placement:
    """The placement without a TTFT: the one with the lowest weighted sum of first token and end.

    All predictions are for steps that keep the gaps of streams. So a longer queue costs time and no gaps, and prompts
    go to every node that has time for them.
    """
    assert remote.predicted_ttft_s is not None
    assert remote.prefill is not None
    more, decode = _FIRST_WEIGHT - 1, remote.decode
    gap_s = hand_over_s(remote.prefill, decode, wanted, held_s=remote.held_s)
    end_s = remote.predicted_ttft_s + gap_s + output_s(decode, wanted)
    least_s, best = end_s + more * remote.predicted_ttft_s, None
    if not remote.prefill.decode_rows:
        least_s -= _MIN_SAVED_S
    for node in _tried(usable, decode, wanted):
        found = _on_one_node(node, wanted)
        if found is None:
            continue
        weighted_s = found.end_s + more * found.ttft_s
        if node.also_prefills:
            weighted_s += _FIRST_WEIGHT * _PROMPTS_MET * slower_s(node, wanted)
        if weighted_s < least_s:
            least_s, best = weighted_s, found
    if best is None:
        return replace(remote, reason=_relaxed(remote.prefill, remote.predicted_ttft_s, wanted))
    reason = (
        f"{best.node.label} alone would send the first token after {_s(best.ttft_s)} and end a typical output "
        f"after {_s(best.end_s)}, instead of {_s(remote.predicted_ttft_s)} and {_s(end_s)}"
    )
    relaxed = _relaxed(best.node, best.ttft_s, wanted)
    return Placement(Route.LOCAL, best.node, None, 0, f"{reason}; {relaxed}" if relaxed else reason, best.ttft_s)


def _relaxed(node: NodeView, first_s: float, wanted: RoutedRequest) -> str:
    """Says that a node makes the gaps of its streams longer for the prompt; empty if it does not."""
    alone_s = node.prompt_s(node.cached_tokens, wanted.num_tokens)
    objective = wanted.objective
    waits = node.decode_rows > 0 and node.queue_s > 0 and wanted.slo.tpot_s is None
    due_s = first_token_due_s(alone_s, objective.ttft_factor)
    if not waits or first_s <= due_s:
        return ""
    return (
        f"steps of {node.label} exceed {objective.gap_factor:g} times those without prompts, because the prompt takes "
        f"{_s(alone_s)} alone and waits for more than {_s(due_s)}"
    )


# ---- with a TTFT


def _within_ttft(remote: Placement, usable: Sequence[NodeView], ttft_s: float, wanted: RoutedRequest) -> Placement:
    """The placement that meets the TTFT and the TPOT, or that has the earliest first token."""
    prefill, decode, remote_s = remote.prefill, remote.decode, remote.predicted_ttft_s
    assert prefill is not None
    assert remote_s is not None
    gap_s = hand_over_s(prefill, decode, wanted, held_s=remote.held_s)
    is_soon = remote_s <= _PRESSED * ttft_s
    if is_soon and (wanted.slo.tpot_s is None or gap_s <= wanted.slo.tpot_s):
        return remote
    shared_nodes = [node for node in usable if node.also_prefills and leaves_time_for_prompts(node, wanted)]
    if is_soon and not shared_nodes:
        return remote
    decode_nodes = [node for node in usable if not node.also_prefills]
    tried = _tried([*decode_nodes, *shared_nodes], decode, wanted)
    found = [_on_one_node(node, wanted, grows=not shared_nodes) for node in tried]
    local = min((each for each in found if each is not None), key=lambda each: each.end_s, default=None)
    if local is not None and local.ttft_s <= ttft_s:
        reason = _too_slow(prefill, remote_s, ttft_s)
        if is_soon:
            reason = f"a hand-over to {decode.label} would pause the output for {_s(gap_s)}"
        return Placement(Route.LOCAL, local.node, None, 0, reason, local.ttft_s)
    split = _split(local, prefill, remote_s, ttft_s, wanted)
    if split is not None:
        return split
    if not remote.meets and local is not None and local.ttft_s < remote_s:
        reason = f"no node is in time, and {_too_slow(prefill, remote_s, ttft_s)}"
        return Placement(Route.LOCAL, local.node, None, 0, reason, local.ttft_s, meets=False)
    return remote


def _split(
    local: _OnOneNode | None, prefill: NodeView, remote_s: float, ttft_s: float, wanted: RoutedRequest
) -> Placement | None:
    """The split with the smallest part on the prefill node, the bottleneck, that meets the TTFT.

    Returns None if there is no such split.
    """
    if local is None or not wanted.splittable or local.node.incarnation not in prefill.ready_peers:
        return None
    node, steps, tokens = local.receiver, local.steps, wanted.num_tokens
    if steps.stretch * node.queue_s > _PRESSED * ttft_s:  # the decode node is as busy as the prefill node
        return None
    unit = math.lcm(node.block_size, prefill.block_size)
    least = max(node.cached_tokens + _SPLIT_MIN_TOKENS, prefill.cached_tokens)
    most = tokens - _SPLIT_MIN_TOKENS
    for number in range(1, _SPLITS_TRIED + 1):
        split = (least + (most - least) * number // _SPLITS_TRIED) // unit * unit
        if not least <= split <= most:
            continue
        sent_s = prefill_s(prefill, prefill.cached_tokens, split, wanted)
        sent_s += transfer_s(prefill, node, split - node.cached_tokens)
        waiting_s = max(0.0, node.queue_s - sent_s / steps.stretch)
        first_s = sent_s + steps.ttft_s(waiting_s, split, tokens) + wanted.overheads.remote_s
        if first_s <= ttft_s:
            reason = _too_slow(prefill, remote_s, ttft_s)
            return Placement(Route.SPLIT, node, prefill, split, reason, first_s)
    return None


def _local_by_policy(decode: NodeView, reason: str, wanted: RoutedRequest) -> Placement:
    decode = decode.computing
    steps = local_steps(decode, wanted.num_tokens, wanted, waiting_s=decode.wait_s)
    first_s = None
    if steps is not None:
        first_s = steps.ttft_s(decode.wait_s, decode.cached_tokens, wanted.num_tokens) + wanted.overheads.local_s
    meets = first_s is None or wanted.slo.ttft_s is None or first_s <= wanted.slo.ttft_s
    return Placement(Route.LOCAL, decode, None, 0, reason, first_s, meets)


def _too_slow(prefill: NodeView, seconds: float, ttft_s: float) -> str:
    """Says why a prefill node does not get the prompt."""
    if seconds == math.inf:
        return f"the streams on {prefill.label} leave it no time for prompts"
    return f"{prefill.label} would take {_s(seconds)} of the {_s(ttft_s)} to the first token"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
