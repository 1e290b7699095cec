"""One simulated request: its load, its state, and the times of its tokens. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from baton.gateway.fleet.placement import Route
from baton.load.goals import Goal

_ROUNDING = 1e-6  # of sums of counts


@dataclass(eq=False, slots=True)
class PlanJob:
    """One simulated request.

    Attributes:
        arrived_s: when its client sent it.
        due_s: when its first token is due; the order of prompts on a node.
        at, stop: the next prompt token to compute, and the first one not to compute, on the current node.
        first_s, second_s, last_s: arrival times of tokens; infinite: not yet.
        prefill, decode: numbers of its nodes; -1: none.
        runs: runs of the decode node's steps, each with their number and the gap between their tokens; this request's
            are from `first_run` to `last_run`.
        sent: prompt tokens whose KV has been sent.
        late_share, late_s: share of its tokens that are late, and their delay.
        held_until_s: how long its first token may wait for the second one.
        begun: whether a step has computed a part of its prompt on the current node.
        ready_s: when its KV was complete on the decode node.
        cached: prompt tokens that came from the prefix cache of the node that computed the prompt.
    """

    arrived_s: float
    prompt: int
    output: int
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int = 0
    counted: bool = True
    due_s: float = inf
    queued_s: float = 0.0
    at: int = 0
    stop: int = 0
    started: bool = False
    route: Route = Route.REMOTE
    prefill: int = -1
    decode: int = -1
    first_s: float = inf
    second_s: float = inf
    last_s: float = inf
    runs: Sequence[tuple[int, float]] = ()
    first_run: int = 0
    last_run: int = 0
    cached: int = 0
    sent: int = 0
    late_share: float = 0.0
    late_s: float = 0.0
    held_until_s: float = 0.0
    begun: bool = False
    ready_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """The mean time per token after the first."""
        return (self.last_s - self.first_s) / (self.output - 1) if self.output > 1 else 0.0

    def second_token_came(self, second_s: float) -> None:
        """Sets the time of the second token, which also releases the first one."""
        self.second_s = second_s
        self.first_s = max(self.first_s, min(self.held_until_s, second_s))

    def gaps(self) -> list[tuple[float, float]]:
        """The gaps between its tokens, each with how many they are on average."""
        gaps = [(self.second_s - self.first_s, 1.0)]
        left, late = self.output - 2, self.late_share
        # The step that made the second token is in its first run, and is not a gap of its own.
        for number, (count, step_s) in enumerate(self.runs[self.first_run : self.last_run + 1]):
            taken = min(left, count - (number == 0))
            left -= taken
            gaps.append((step_s, (1 - late) * taken))
            if late:
                gaps.append((step_s + self.late_s, late * taken))
        return gaps

    def gap_quantile_s(self, share: float) -> float:
        """A quantile of the request's own gaps between tokens."""
        if self.output < 2:
            return 0.0
        if self.last_s == inf:
            return inf
        gaps = sorted(self.gaps())
        wanted, seen = ceil(share * (self.output - 1)) - _ROUNDING, 0.0
        for gap_s, count in gaps:
            seen += count
            if seen >= wanted:
                return gap_s
        return gaps[-1][0]

    def meets(self, goal: Goal) -> bool:
        return (
            (goal.ttft_s is None or self.ttft_s <= goal.ttft_s)
            and (goal.tpot_s is None or self.tpot_s <= goal.tpot_s)
            and (goal.e2e_s is None or self.last_s - self.arrived_s <= goal.e2e_s)
            and (goal.gap_s is None or self.gap_quantile_s(0.99) <= goal.gap_s)
        )
