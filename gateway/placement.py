"""Where one request's prompt is prefilled: on a prefill node, on the decode node, or split between them. Pure.

Prefill nodes do nothing else, so their time is free until a queue builds up there. Then they are the cluster's
bottleneck, and a decode node takes prompts, as far as its streams stay within their TPOT: all of a prompt, or the rest
after a prefill node's part. If no way meets the SLO, the one with the earliest first token is chosen; without a TTFT,
the one that delays fewer tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from baton.types import LocalPolicy
from gateway.prediction import LocalSteps, local_steps, prefill_s, transfer_s
from gateway.router import NodeView, Wanted, pick_decode, pick_prefill, usable_decodes

# Parts of the TTFT: that a first token from a prefill node may take while a decode node could take the prompt, and
# within which a first token from a decode node is planned. Chosen by `tests/unit/gateway/test_goodput.py`'s model.
_PRESSED = 0.25
_PLANNED = 0.7
# Without a TTFT a decode node takes a prompt only from a queue longer than that, and if that saves as much.
_SAVES_S = 0.05
_SAVES_PART = 0.2
_SPLIT_LEAST_TOKENS = 512  # a smaller part is not worth a transfer
_SPLITS_TRIED = 8


class Way(Enum):
    """How a prompt is computed."""

    REMOTE = "remote"
    LOCAL = "local"
    SPLIT = "split"


@dataclass(frozen=True)
class Placement:
    """The choice for one request.

    Args:
        prefill: None for `Way.LOCAL`, and where the prefill node is not known to matter.
        split_tokens: `Way.SPLIT`: the prefill node computes the tokens before this one; a multiple of both block sizes.
        why: one sentence for the receipt.
        predicted_ttft_s: from now to the first token; None: not known.
        meets: whether the prediction is within the TTFT; True where there is none.
    """

    way: Way
    decode: NodeView
    prefill: NodeView | None
    split_tokens: int
    why: str
    predicted_ttft_s: float | None
    meets: bool = True


def place(decodes: Sequence[NodeView], prefills: Sequence[NodeView], wanted: Wanted) -> Placement | None:
    """The nodes and the way for a request; None: no decode node can take it."""
    alone = [node for node in decodes if node.also_prefills]
    decodes = [node for node in decodes if not node.also_prefills]
    decode = pick_decode(decodes, prefills, wanted)
    if decode is None:
        return _on_prefill_node(alone, wanted)
    if wanted.policy is LocalPolicy.LOCAL:
        return _local_by_policy(decode, "the policy is local", wanted)
    prefill = pick_prefill(prefills, decode, wanted)
    if prefill is None:
        return _local_by_policy(decode, "no prefill node is available", wanted)
    remote_s = prefill_s(prefill, prefill.cached_tokens, wanted.num_tokens)
    if remote_s is None:
        return Placement(Way.REMOTE, decode, prefill, 0, "", None)
    ttft_s = wanted.slo.ttft_s
    remote = Placement(Way.REMOTE, decode, prefill, 0, "", remote_s, meets=ttft_s is None or remote_s <= ttft_s)
    if wanted.policy is not LocalPolicy.ELASTIC or (ttft_s is not None and remote_s <= _PRESSED * ttft_s):
        return remote
    local = _best_local(decodes, decode, wanted)
    if ttft_s is None:
        return _fewer_delays(remote, remote_s, local)
    if local is not None and local.first_token_s <= _PLANNED * ttft_s:
        why = f"{prefill.address} would take {_s(remote_s)} of the {_s(ttft_s)} to the first token"
        return Placement(Way.LOCAL, local.node, None, 0, why, local.first_token_s)
    split = _split(local, prefill, remote_s, ttft_s, wanted)
    if split is not None:
        return split
    if not remote.meets and local is not None and local.first_token_s < remote_s:
        why = f"no node meets {_s(ttft_s)} to the first token, and {prefill.address} would take {_s(remote_s)}"
        return Placement(Way.LOCAL, local.node, None, 0, why, local.first_token_s, meets=local.first_token_s <= ttft_s)
    return remote


@dataclass(frozen=True)
class _Local:
    """A prompt on a decode node.

    Args:
        first_token_s: from now to its first token.
        delay_s: by how much it delays each of the node's streams beyond what their TPOT allows, in all.
    """

    node: NodeView
    steps: LocalSteps
    first_token_s: float
    delay_s: float


def _best_local(decodes: Sequence[NodeView], decode: NodeView, wanted: Wanted) -> _Local | None:
    """The decode node that would have the first token first. `decode` wins ties: it has the fewest requests."""
    found: _Local | None = None
    for node in [decode, *usable_decodes(decodes, wanted)]:
        if node is not decode and not node.has_room(wanted.num_tokens + 1):
            continue
        steps = local_steps(node, wanted.num_tokens, wanted.slo.tpot_s)
        if steps is None:
            continue
        first_s = steps.first_token_s(node.queue_s, node.cached_tokens, wanted.num_tokens)
        if found is None or first_s < found.first_token_s:
            delay_s = 0.0 if steps.bounded else steps.extra_s(node.cached_tokens, wanted.num_tokens)
            found = _Local(node, steps, first_s, delay_s if steps.rows else 0.0)
    return found


def _fewer_delays(remote: Placement, remote_s: float, local: _Local | None) -> Placement:
    """Without a TTFT: the prompt goes where it, and the streams that wait for it, lose the least time."""
    assert remote.prefill is not None
    queues = remote.prefill.queue_s > _SAVES_S
    if not queues or local is None or local.first_token_s + local.delay_s + _SAVES_S > (1 - _SAVES_PART) * remote_s:
        return remote
    why = f"first token in {_s(local.first_token_s)} instead of {_s(remote_s)} on {remote.prefill.address}"
    return Placement(Way.LOCAL, local.node, None, 0, why, local.first_token_s)


def _split(local: _Local | None, prefill: NodeView, remote_s: float, ttft_s: float, wanted: Wanted) -> Placement | None:
    """The smallest part on the prefill node, the bottleneck, with which the first token is in time."""
    if local is None or not wanted.splittable or local.node.incarnation not in prefill.ready_peers:
        return None
    node, steps, tokens = local.node, local.steps, wanted.num_tokens
    if steps.stretch * node.queue_s > _PRESSED * ttft_s:  # the decode node is no less busy
        return None
    unit = math.lcm(node.block_size, prefill.block_size)
    least = max(node.cached_tokens + _SPLIT_LEAST_TOKENS, prefill.cached_tokens)
    most = tokens - _SPLIT_LEAST_TOKENS
    for number in range(1, _SPLITS_TRIED + 1):
        split = (least + (most - least) * number // _SPLITS_TRIED) // unit * unit
        if not least <= split <= most:
            continue
        part_s = prefill_s(prefill, prefill.cached_tokens, split)
        assert part_s is not None, "the prefill node has costs"
        sent_s = part_s + transfer_s(prefill, node, split - node.cached_tokens)
        waiting_s = max(0.0, node.queue_s - sent_s / steps.stretch)
        first_s = sent_s + steps.first_token_s(waiting_s, split, tokens)
        if first_s <= _PLANNED * ttft_s:
            why = f"{prefill.address} alone would take {_s(remote_s)} of the {_s(ttft_s)} to the first token"
            return Placement(Way.SPLIT, node, prefill, split, why, first_s)
    return None


def _on_prefill_node(alone: Sequence[NodeView], wanted: Wanted) -> Placement | None:
    """The whole request on a prefill node that also decodes, without a hand-over."""
    if wanted.policy is LocalPolicy.STRICT:
        return None
    node = pick_decode(alone, [], wanted)
    return None if node is None else _local_by_policy(node, "no decode node is available", wanted)


def _local_by_policy(decode: NodeView, why: str, wanted: Wanted) -> Placement:
    steps = local_steps(decode, wanted.num_tokens, wanted.slo.tpot_s)
    first_s = None
    if steps is not None:
        first_s = steps.first_token_s(decode.queue_s, decode.cached_tokens, wanted.num_tokens)
    meets = first_s is None or wanted.slo.ttft_s is None or first_s <= wanted.slo.ttft_s
    return Placement(Way.LOCAL, decode, None, 0, why, first_s, meets)


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s"
