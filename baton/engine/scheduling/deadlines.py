"""The order of requests by deadline, and which of them can no longer meet theirs. Pure.

Requests are computed in the order of priority, then of the time when their first token is due. That order is best as
long as every deadline can be met. Under overload it fails all of them, so a request that is late even if it is computed
next goes after those that are not: it counts as due `DEFAULT_TTFT_S` later than it was. A request without a deadline
counts as due `DEFAULT_TTFT_S` after its arrival. Each of these is therefore first in its priority after a bounded time.

Requests whose client has tokens go before all others of their priority, in order of arrival (`QueuePlace.begun`).
"""

from collections.abc import Sequence

from baton.core.costs import StepCosts, chunk_pairs
from baton.engine.request import DEFAULT_TTFT_S, QueuePlace
from baton.engine.scheduling.slices import SlicePace
from baton.engine.scheduling.state import RequestState


def place_of_late(state: RequestState) -> QueuePlace:
    """The place of a request that cannot meet its deadline."""
    return state.place._replace(due_s=state.place.due_s + DEFAULT_TTFT_S)


def is_late(state: RequestState, pace: SlicePace | None, *, start: int, now: float) -> bool:
    """Whether the first token comes after it is due, even if the prompt is computed before all others.

    Args:
        pace: next to the present decodes; None: not known, so only a deadline that has passed counts.
        start: tokens before this one need not be computed.
    """
    if state.due_s is None:
        return False
    computing_s = 0.0 if pace is None else pace.seconds(start, state.prefill_stop)
    return now + computing_s > state.due_s


def backlog_s(costs: StepCosts, prompts: Sequence[RequestState], *, step_tokens: int) -> float:
    """The time to compute the rest of all these prompts in full steps, if nothing else ran."""
    tokens = sum(state.prompt_remaining for state in prompts)
    pairs = sum(chunk_pairs(state.num_computed, state.prefill_stop) for state in prompts)
    return costs.prompt_s(0, tokens, step_tokens=step_tokens) + costs.pair_s * (pairs - chunk_pairs(0, tokens))
