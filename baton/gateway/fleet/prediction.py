"""Predicts when a prompt's first token would come from a prefill or a decode node, from the nodes' reports. Pure."""

import math
from dataclasses import dataclass, replace
from functools import partial

from baton.core.costs import (
    FORCED_STRETCH,
    MIN_SLICE_TOKENS,
    RELAXED_MAX,
    SKIPS_MAX,
    StepCosts,
    StepWork,
    chunk_pairs,
)
from baton.core.decode_pace import DRAFTS_SHARE, PLAIN_PACE
from baton.core.types import first_token_due_s
from baton.gateway.fleet.node_view import NodeView
from baton.gateway.fleet.router import OUTPUT_TOKENS, RoutedRequest, decode_s, token_s
from baton.gateway.fleet.second_token import hold_s, longest_gap_s

# A step that contains prompt tokens is planned to take this share of the streams' TPOT, and the streams' own work at
# most `_DECODE_USED` of such a step.
_TPOT_USED = 0.9
_DECODE_USED = 0.9
_MIN_SLICE = 32
# A prefill node with streams may take this share of the TTFT longer for a prompt.
_SLOWER_SHARE = 0.1
_SHARED_SLICE = 256  # prompt tokens that a step of a prefill node with streams must still fit, to keep its speed
_SOLVER_ROUNDS = 8
_DEFAULT_BYTES_PER_S = 10e9


def prompt_s(node: NodeView, start: int, stop: int) -> float:
    """The node's time for a prompt's tokens without streams; 0 if its costs are unknown."""
    return 0.0 if node.costs is None else node.prompt_s(start, stop)


def prefill_s(node: NodeView, start: int, stop: int, wanted: RoutedRequest) -> float:
    """Time from now until a prefill node has computed a prompt's tokens from `start` to `stop`, next to its streams.

    Infinite if its costs are unknown or its streams leave no time.
    """
    if not node.decode_rows:
        return node.prefill_s(start, stop)
    steps = local_steps(node, stop, wanted, waiting_s=node.wait_s)
    return math.inf if steps is None else steps.ttft_s(node.wait_s, start, stop)


def transfer_s(prefill: NodeView, decode: NodeView, tokens: int) -> float:
    """Time to send the KV of `tokens` tokens and a recurrent state over the pair's link."""
    speed = prefill.peer_bytes_per_s.get(decode.incarnation) or _DEFAULT_BYTES_PER_S
    return (max(0, tokens) * prefill.kv_bytes_per_token + prefill.state_bytes) / speed


def hand_over_s(prefill: NodeView, decode: NodeView, wanted: RoutedRequest, *, held_s: float = 0.0) -> float:
    """Gap between the first token, from the prefill node, and the second one, from the decode node.

    The KV of the last prefill step is sent, the decode node's running step ends, and its next step computes the token.

    Args:
        held_s: how long the gateway holds the first token.
    """
    tokens = min(prefill.step_tokens, wanted.num_tokens - decode.cached_tokens)
    step_s = (decode.pace or PLAIN_PACE).step_ratio * decode_s(decode, wanted)
    return max(0.0, transfer_s(prefill, decode, tokens) + 2 * step_s - held_s)


def first_held_s(decode: NodeView, wanted: RoutedRequest, came_s: float) -> float:
    """How long the gateway will hold the first token of a hand-over that comes after `came_s`, so that the second one
    follows without a long gap."""
    gap_s = longest_gap_s(decode_s(decode, wanted), wanted.slo, wanted.objective)
    return hold_s(decode.second_token_s, gap_s, wanted.slo, waited_s=came_s)


def output_s(node: NodeView, wanted: RoutedRequest) -> float:
    """Time of a typical output on this node, with the wait for a seat and without prompts in its steps."""
    seats = node.max_batch_requests
    outputs_before = max(0, node.load + 1 - seats) / seats if seats else 0.0
    return (1 + outputs_before) * OUTPUT_TOKENS * token_s(node, wanted)


@dataclass(frozen=True)
class LocalSteps:
    """The steps of a decode node while it computes prompts next to its streams.

    Args:
        rows: number of decoding streams.
        keys: sum of the streams' contexts.
        slice_tokens: prompt tokens in one step.
        step_s: time of such a step, and of steps without prompts that must come before the next such step.
        queue_stretch: how many times longer than without streams the prompts before take. Steps are longer while
            prompts wait (`baton.engine.scheduling.slices`); None: as long as for this prompt.
    """

    costs: StepCosts
    rows: int
    keys: int
    slice_tokens: int
    step_s: float
    queue_stretch: float | None = None

    @property
    def stretch(self) -> float:
        """How many times longer prompts take than without streams."""
        return self.step_s / self.costs.prompt_s(0, self.slice_tokens, step_tokens=self.slice_tokens)

    def ttft_s(self, waiting_s: float, start: int, stop: int) -> float:
        """Time from now to the first token, after waiting prompts that would take `waiting_s` without streams."""
        steps = math.ceil((stop - start) / self.slice_tokens)
        # The running step is half over on average.
        stretch = self.stretch if self.queue_stretch is None else self.queue_stretch
        return max(1.0, stretch) * waiting_s + (steps + 0.5 * (self.rows > 0)) * self.step_s


def local_steps(
    node: NodeView,
    prompt_tokens: int,
    wanted: RoutedRequest,
    *,
    waiting_s: float = 0.0,
    grows: bool = False,
    joining: int = 0,
) -> LocalSteps | None:
    """The steps of a node that computes a prompt. Returns None if its costs are unknown or its streams leave no time.

    Args:
        waiting_s: time that the prompts before would take without streams.
        joining: streams that it has in addition to the present ones.
        grows: all new streams stay on this node, because no prefill node decodes any.
    """
    costs = node.costs
    if costs is None:
        return None
    rows = node.decode_rows + node.streams_since + joining
    context = node.context_tokens / node.decode_rows if node.decode_rows else prompt_tokens
    keys = int(rows * context)
    most = node.step_tokens - rows
    if most < _MIN_SLICE:
        return None
    middle = prompt_tokens // 2
    if not rows:
        return _steps(costs, rows, keys, middle, min(most, prompt_tokens))
    tpot_s, plain_s = wanted.slo.tpot_s, costs.seconds(StepWork(rows, keys))
    drafts_s = max(0.0, (node.pace or PLAIN_PACE).prompt_step_ratio - 1) * plain_s
    if tpot_s is None:
        most = min(most, prompt_tokens)
        relaxed = partial(_relaxed_steps, costs, rows, keys, middle, most, drafts_s=drafts_s)
        steps = relaxed(gaps=wanted.objective.gap_factor)
        if not waiting_s:
            return steps
        # While this prompt waits, its own wait makes the steps longer, by half of that on average.
        due_s = first_token_due_s(node.prompt_s(0, prompt_tokens), wanted.objective.ttft_factor)
        gaps = wanted.objective.gap_factor * min(1 + steps.stretch * waiting_s / due_s / 2, RELAXED_MAX)
        return replace(steps, queue_stretch=relaxed(gaps=gaps).stretch)
    step_s = _TPOT_USED * tpot_s
    # NOTE: longer steps make streams last longer, so there will be more of them. If all streams stay on this node and
    # prompts are accepted for the present number of streams only, decode steps alone will exceed the TPOT.
    later = max(1.0, step_s / plain_s) if grows else 1.0
    if costs.seconds(StepWork(math.ceil(later * rows), math.ceil(later * keys))) > _DECODE_USED * step_s:
        return None
    step_s = _longest_s(step_s, plain_s, drafts_s)
    tokens = _slice_tokens(costs, rows, keys, middle, most=most, step_s=step_s - drafts_s)
    return None if tokens < _MIN_SLICE else LocalSteps(costs, rows, keys, tokens, step_s)


def _longest_s(bound_s: float, plain_s: float, drafts_s: float) -> float:
    """The mean time of steps that prompts fill up to a bound, with what drafts add to them.

    Next to drafts, prompts may get only half of the time above the plain step (`baton.engine.scheduling.slices`).
    `drafts_s` is a mean of steps with drafts, which are about twice as long as plain ones, and of steps without.
    """
    if not drafts_s:
        return bound_s
    lost = DRAFTS_SHARE * min(1.0, drafts_s / plain_s)
    return bound_s + drafts_s - lost * max(0.0, bound_s - plain_s)


def _relaxed_steps(
    costs: StepCosts, rows: int, keys: int, start: int, most: int, *, gaps: float, drafts_s: float
) -> LocalSteps:
    """The steps without a TPOT, which take at most `gaps` times a plain one, or longer where they have drafts.

    Args:
        drafts_s: how much longer drafts make steps.
    """
    plain_s = costs.seconds(StepWork(rows, keys))
    step_s = _longest_s(gaps * plain_s, plain_s, drafts_s)
    tokens = _slice_tokens(costs, rows, keys, start, most=most, step_s=step_s - drafts_s)
    least = min(MIN_SLICE_TOKENS, most)
    if tokens >= least:
        return _steps(costs, rows, keys, start, tokens, drafts_s)
    forced_s = FORCED_STRETCH * _steps(costs, rows, keys, start, least, drafts_s).step_s
    tokens = max(least, _slice_tokens(costs, rows, keys, start, most=most, step_s=forced_s - drafts_s))
    steps = _steps(costs, rows, keys, start, tokens, drafts_s)
    return replace(steps, step_s=steps.step_s + SKIPS_MAX * (plain_s + drafts_s))


def _steps(costs: StepCosts, rows: int, keys: int, start: int, tokens: int, drafts_s: float = 0.0) -> LocalSteps:
    work = StepWork(rows, keys, tokens, chunk_pairs(start, start + tokens))
    return LocalSteps(costs, rows, keys, tokens, costs.seconds(work) + drafts_s)


def slower_s(node: NodeView, wanted: RoutedRequest) -> float:
    """How much longer a typical prompt takes on a prefill node while it decodes one more request, beyond one step.

    Infinite if its costs are unknown or streams would leave no time.
    """
    tokens = wanted.typical_tokens or wanted.num_tokens
    steps = local_steps(node, tokens, wanted, joining=1)
    if steps is None:
        return math.inf
    later_s = math.ceil(tokens / steps.slice_tokens) * steps.step_s - node.prompt_s(0, tokens)
    return max(0.0, later_s - steps.step_s)


def leaves_time_for_prompts(node: NodeView, wanted: RoutedRequest) -> bool:
    """Whether a prefill node can keep the request's TPOT and still compute prompts at a useful speed.

    One stream bounds all steps of the node, and short steps with long contexts leave hardly any time for prompts.
    """
    if node.costs is None:
        return False
    if wanted.slo.tpot_s is None:
        return wanted.slo.ttft_s is None or slower_s(node, wanted) <= _SLOWER_SHARE * wanted.slo.ttft_s
    middle = wanted.num_tokens // 2
    pairs = chunk_pairs(middle, middle + _SHARED_SLICE)
    step_s = node.costs.seconds(StepWork(1, wanted.num_tokens, _SHARED_SLICE, pairs))
    return step_s <= _TPOT_USED * wanted.slo.tpot_s


def _slice_tokens(costs: StepCosts, rows: int, keys: int, start: int, *, most: int, step_s: float) -> int:
    """The largest number of prompt tokens, from position `start`, with which a step takes at most `step_s`."""
    low, high = 0, most
    for _ in range(_SOLVER_ROUNDS):
        tokens = (low + high + 1) // 2
        work = StepWork(rows, keys, tokens, chunk_pairs(start, start + tokens))
        low, high = (tokens, high) if costs.seconds(work) <= step_s else (low, tokens)
    return low
