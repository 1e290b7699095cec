"""When a prompt's first token would come, on a prefill node and on a decode node, by the nodes' reports. Pure."""

import math
from dataclasses import dataclass

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.gateway.fleet.router import OUTPUT_TOKENS, NodeView, RoutedRequest, decode_s

# Steps that hold a prompt are planned to take this part of the streams' TPOT, and the streams alone this part of them.
_TPOT_USED = 0.9
_DECODE_USED = 0.9
_LEAST_SLICE = 32
_SHARED_SLICE = 256  # of a step that also decodes on a prefill node: its speed with prompts is kept
_SOLVER_ROUNDS = 8
_DEFAULT_BYTES_PER_S = 10e9


def prompt_s(node: NodeView, start: int, stop: int) -> float:
    """The node's time for a prompt's tokens, alone; 0 where no costs are known."""
    return 0.0 if node.costs is None else node.prompt_s(start, stop)


def prefill_s(node: NodeView, start: int, stop: int, tpot_s: float | None) -> float:
    """From now until a prefill node has computed a prompt's tokens from `start` to `stop`, next to its own streams if
    it has some; infinite: no costs are known, or the streams leave no time."""
    if not node.decode_rows:
        return node.prefill_s(start, stop)
    steps = local_steps(node, stop, tpot_s)
    return math.inf if steps is None else steps.ttft_s(node.queue_s, start, stop)


def transfer_s(prefill: NodeView, decode: NodeView, tokens: int) -> float:
    """The time to send the KV of so many tokens, and a state, over the pair's link."""
    speed = prefill.peer_bytes_per_s.get(decode.incarnation) or _DEFAULT_BYTES_PER_S
    return (max(0, tokens) * prefill.kv_bytes_per_token + prefill.state_bytes) / speed


def hand_over_s(prefill: NodeView, decode: NodeView, wanted: RoutedRequest) -> float:
    """Between the first token, of the prefill node, and the second one, of the decode node: the last step's KV is sent,
    the step that runs there ends, and the next one computes."""
    tokens = min(prefill.step_tokens, wanted.num_tokens - decode.cached_tokens)
    return transfer_s(prefill, decode, tokens) + 2 * decode_s(decode, wanted)


def output_s(node: NodeView, wanted: RoutedRequest) -> float:
    """The time of a typical output on this node, without prompts in its steps, and until it has a seat there."""
    seats = node.max_batch_requests
    outputs_before = max(0, node.load + 1 - seats) / seats if seats else 0.0
    return (1 + outputs_before) * OUTPUT_TOKENS * decode_s(node, wanted)


@dataclass(frozen=True)
class LocalSteps:
    """The steps of a decode node while it computes prompts next to its streams.

    Args:
        rows, keys: the streams that decode then, and the sum of their contexts.
        slice_tokens: tokens of prompts in one step.
        step_s: the time of such a step.
        bounded: the step was cut to the streams' TPOT.
    """

    costs: StepCosts
    rows: int
    keys: int
    slice_tokens: int
    step_s: float
    bounded: bool

    @property
    def stretch(self) -> float:
        """How much longer prompts take than alone."""
        return self.step_s / self.costs.prompt_s(0, self.slice_tokens, step_tokens=self.slice_tokens)

    def ttft_s(self, waiting_s: float, start: int, stop: int) -> float:
        """From now to the first token, after prompts that would take so many seconds alone."""
        steps = math.ceil((stop - start) / self.slice_tokens)
        # The step that runs now is half over on average.
        return max(1.0, self.stretch) * waiting_s + (steps + 0.5 * (self.rows > 0)) * self.step_s

    def extra_s(self, start: int, stop: int) -> float:
        """By how much the prompt makes the node's steps longer, in all."""
        plain_s = self.costs.seconds(StepWork(self.rows, self.keys))
        return math.ceil((stop - start) / self.slice_tokens) * max(0.0, self.step_s - plain_s)


def local_steps(node: NodeView, prompt_tokens: int, tpot_s: float | None, *, grows: bool = False) -> LocalSteps | None:
    """The steps of a node that computes a prompt; None: no costs are known, or its streams leave no time.

    Args:
        grows: no other node takes streams from it.
    """
    costs = node.costs
    if costs is None:
        return None
    rows = node.decode_rows + node.requests_since
    context = node.context_tokens / node.decode_rows if node.decode_rows else prompt_tokens
    keys = int(rows * context)
    most = node.step_tokens - rows
    if most < _LEAST_SLICE:
        return None
    middle = prompt_tokens // 2
    if tpot_s is None or not rows:
        tokens = min(most, prompt_tokens)
        work = StepWork(rows, keys, tokens, chunk_pairs(middle, middle + tokens))
        return LocalSteps(costs, rows, keys, tokens, costs.seconds(work), bounded=not rows)
    step_s = _TPOT_USED * tpot_s
    # NOTE: longer steps keep streams longer, so there will be more of them. If all streams stay on this node, and
    # prompts are taken while only the present ones fit, the decode steps alone will exceed the TPOT.
    later = max(1.0, step_s / costs.seconds(StepWork(rows, keys))) if grows else 1.0
    if costs.seconds(StepWork(math.ceil(later * rows), math.ceil(later * keys))) > _DECODE_USED * step_s:
        return None
    tokens = _slice_tokens(costs, rows, keys, middle, most=most, step_s=step_s)
    return None if tokens < _LEAST_SLICE else LocalSteps(costs, rows, keys, tokens, step_s, bounded=True)


def leaves_time_for_prompts(node: NodeView, wanted: RoutedRequest) -> bool:
    """Whether a prefill node still computes prompts well while it keeps the request's TPOT. One stream bounds all steps
    of the node, and short steps with long contexts have hardly any room for prompts."""
    if node.costs is None or wanted.slo.tpot_s is None:
        return node.costs is not None
    middle = wanted.num_tokens // 2
    pairs = chunk_pairs(middle, middle + _SHARED_SLICE)
    step_s = node.costs.seconds(StepWork(1, wanted.num_tokens, _SHARED_SLICE, pairs))
    return step_s <= _TPOT_USED * wanted.slo.tpot_s


def _slice_tokens(costs: StepCosts, rows: int, keys: int, start: int, *, most: int, step_s: float) -> int:
    """The most prompt tokens, after `start` others, with which a step takes no longer than `step_s`."""
    low, high = 0, most
    for _ in range(_SOLVER_ROUNDS):
        tokens = (low + high + 1) // 2
        work = StepWork(rows, keys, tokens, chunk_pairs(start, start + tokens))
        low, high = (tokens, high) if costs.seconds(work) <= step_s else (low, tokens)
    return low
