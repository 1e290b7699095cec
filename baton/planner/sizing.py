"""Estimates step sizes (by a model of costs) and the number of prefill nodes (by the work) before a simulation.
Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.costs import StepCosts, StepWork, chunk_pairs
from baton.load.goals import Goal
from baton.load.workload import PlannedRequest
from baton.planner.drafts import NO_DRAFTS, MeanDrafts

STEP_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
_FAST_SHARE = 0.95  # of the fastest size's speed
_STEP_OF_TTFT = 0.375
_BOUND_SHARE = 0.9  # of a TPOT that a step next to streams may take
_ROWS_MAX = 4096


@dataclass(frozen=True)
class Demand:
    """The time of nodes that a mean request needs.

    Args:
        prompt, output: mean tokens.
        prefill_s: time of its prompt alone.
        decode_s: its share of the time of a decode node that decodes as many rows as the TPOT allows.
        longest: most tokens of prompt and output of one request.
    """

    prompt: float
    output: float
    prefill_s: float
    decode_s: float
    longest: int

    @property
    def node_s(self) -> float:
        return self.prefill_s + self.decode_s


def demand(
    costs: StepCosts,
    requests: Sequence[PlannedRequest],
    goal: Goal,
    *,
    step_tokens: int,
    seats: int,
    kv_tokens: int,
    drafts: MeanDrafts = NO_DRAFTS,
) -> Demand:
    """The demand of a load, by the costs of one node."""
    count = len(requests)
    prompt = sum(request.prompt_tokens for request in requests) / count
    output = sum(request.output_tokens for request in requests) / count
    prefill_s = sum(costs.prompt_s(0, request.prompt_tokens, step_tokens=step_tokens) for request in requests) / count
    context = int(prompt + output / 2)
    tpot_s = goal.tpot_s or goal.gap_s

    def token_s(rows: int) -> float:
        step = drafts.step(costs, StepWork(rows, rows * context), seats=seats)
        return step.seconds / step.tokens

    low, high = 1, max(2, min(seats, _ROWS_MAX, int(kv_tokens / (prompt + output))) + 1)
    while high - low > 1:
        rows = (low + high) // 2
        fits = tpot_s is None or token_s(rows) <= tpot_s
        low, high = (rows, high) if fits else (low, rows)
    decode_s = output * token_s(low) / low
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    return Demand(prompt, output, prefill_s, decode_s, longest)


def prefill_step_tokens(costs: StepCosts, prompt: float, ttft_s: float | None) -> int:
    """The smallest size that is nearly as fast as the fastest one whose step leaves time for others in the TTFT."""
    middle = int(prompt / 2)

    def seconds(tokens: int) -> float:
        return costs.seconds(StepWork(0, 0, tokens, chunk_pairs(middle, middle + tokens)))

    allowed = [size for size in STEP_SIZES if ttft_s is None or seconds(size) <= _STEP_OF_TTFT * ttft_s] or [
        STEP_SIZES[0]
    ]
    best = max(size / seconds(size) for size in allowed)
    return next(size for size in allowed if size / seconds(size) >= _FAST_SHARE * best)


def decode_step_tokens(costs: StepCosts, tpot_s: float | None) -> int:
    """The smallest size that does not cut the slices that the TPOT allows."""
    if tpot_s is None:
        return prefill_step_tokens(costs, 0, None)
    for size in STEP_SIZES:
        if costs.seconds(StepWork(0, 0, size, chunk_pairs(0, size))) >= _BOUND_SHARE * tpot_s:
            return size
    return STEP_SIZES[-1]


def prefill_nodes(demand: Demand, nodes: int) -> int:
    """The number of nodes that prefill, by the work of both roles; at least one node decodes."""
    return min(nodes - 1, max(0, round(nodes * demand.prefill_s / demand.node_s)))
