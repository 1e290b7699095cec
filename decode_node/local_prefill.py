"""Decides which tokens of a prompt the decode node prefills itself. Pure.

That is the whole prompt, if the gateway asks for it or it hardly slows down the node's decoding requests; the second
part of a split prompt; or nothing.
"""

from dataclasses import dataclass

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.engine.request import EngineRequest
from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node.rules import DecodeRules

# A step may become longer by this part of a plain decode step, or by this time, whichever is more.
_EXTRA_PART = 0.1
_EXTRA_S = 0.001
_TOKENS_WITHOUT_COSTS = 32


@dataclass(frozen=True, slots=True)
class Streams:
    """The load of the node's decoding requests, and the costs of its steps.

    Args:
        costs: of this node's steps; None: not measured yet.
        rows, keys: number of decoding requests, and the sum of their contexts.
        step_tokens: maximum number of tokens of one step.
    """

    costs: StepCosts | None
    rows: int
    keys: int
    step_tokens: int


UNKNOWN = Streams(costs=None, rows=0, keys=0, step_tokens=0)


def local_prefill_reason(tokens: int | None, uncached: int, cached: int, *, streams: Streams) -> str:
    """The reason to prefill `uncached` tokens after `cached` ones on this node; empty if a prefill node should.

    Args:
        tokens: the operator's threshold; None: costs decide.
    """
    idle = not streams.rows and uncached < _TOKENS_WITHOUT_COSTS  # nobody waits, and a hand-over takes longer
    if tokens is None and streams.costs is not None and not idle:
        return _by_costs(streams.costs, uncached, cached, streams)
    threshold = _TOKENS_WITHOUT_COSTS if tokens is None else tokens
    if uncached < threshold:
        return f"{uncached} uncached prompt tokens, under the threshold of {threshold}"
    return ""


def _by_costs(costs: StepCosts, uncached: int, cached: int, streams: Streams) -> str:
    rows = max(1, streams.rows)  # an idle node may have its first stream by the next step
    if rows + uncached > streams.step_tokens:
        return ""
    plain_s = costs.seconds(StepWork(rows, streams.keys))
    mixed_s = costs.seconds(StepWork(rows, streams.keys, uncached, chunk_pairs(cached, cached + uncached)))
    extra_s = mixed_s - plain_s
    if extra_s >= max(_EXTRA_S, _EXTRA_PART * plain_s):
        return ""
    return (
        f"{uncached} uncached prompt tokens, which make a step of {1e3 * plain_s:.3g} ms {1e3 * extra_s:.2g} ms longer"
    )


def requested_local_reason(submit: pb.SubmitRequest) -> str:
    """The gateway's reason to compute the prompt on this node, whatever is cached; empty if it has none."""
    if submit.policy == pb.LOCAL_POLICY_STRICT:
        return ""
    if submit.policy == pb.LOCAL_POLICY_LOCAL:
        return "the policy is local"
    if submit.placement == pb.PLACEMENT_LOCAL:
        return submit.placement_why or "the gateway chose it"
    return "" if submit.prefill_available else "no prefill node is available"


def split_tokens(submit: pb.SubmitRequest, request: EngineRequest, rules: DecodeRules) -> int:
    """Number of leading tokens of a split prompt that a prefill node computes; 0 if the prompt is not split."""
    asked = submit.placement == pb.PLACEMENT_SPLIT and submit.policy == pb.LOCAL_POLICY_PREFER
    if not asked or request.scores_prompt:  # prompt logprobs come from one node
        return 0
    tokens = submit.split_tokens // rules.block_size * rules.block_size
    return tokens if tokens < len(request.prompt) + len(request.output) else 0
