"""Bounds the prompt tokens of steps that also decode, so that the streams of decoding requests do not stall. Pure:
`baton plan` cuts the prompts of simulated nodes with it, too.

With a TPOT, such a step takes at most `_TPOT_SHARE` of the tightest one among the requests that run. A mean of tokens
in time is then kept by every single step, so bursts of prompts never use up what streams are ahead. This also bounds
the gap between two tokens. Only others' drafts may make a step longer, by what the request's own have saved
(`baton.engine.speculation.wait_bounds`). A TPOT is out of reach if a plain decode step takes more than `_OUT_OF_REACH`
times as long. It does not count, because it would only make all prompts wait.

Requests without a TPOT get steps of at most `gap_factor` times a plain decode step. Up to about 1.5 times, prompts are
cheap: a decode step reads all weights, and has time left to compute some tokens more. A node that gets more prompts
than these steps can compute would answer later and later, so the bound grows while the first prompt waits: it is
twice as long once the prompt's first token should have come (`first_token_due_s`), then three times, and so on up to
`RELAXED_MAX` times: then nearly all of a step is prompts, and longer ones would only make the streams stand.

Slices under `MIN_SLICE_TOKENS` are not worth their step, so a prompt waits for a step with more room. After
`SKIPS_MAX` steps without a slice it gets one of this size in any case, and as much more as makes this step at most
`FORCED_STRETCH` times as long. Steps without decodes are not bounded.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, Protocol

from baton.core.costs import (
    FORCED_STRETCH,
    MIN_SLICE_TOKENS,
    RELAXED_MAX,
    SKIPS_MAX,
    StepCosts,
    StepWork,
    chunk_pairs,
)
from baton.core.decode_pace import DRAFTS_SHARE

# A request without a deadline counts as due this long after its arrival.
DEFAULT_TTFT_S = 10.0

_TPOT_SHARE = 0.9
_OUT_OF_REACH = 2.0


class StreamBound(NamedTuple):
    """The bound that a decoding request puts on its node's steps; see `EngineRequest`."""

    tpot_s: float | None
    gap_factor: float


class StepTimes(Protocol):
    """Predicts how long steps take, as `StepCosts` does."""

    def seconds(self, work: StepWork) -> float: ...


class StepBound:
    """The bound on one step's time.

    Args:
        seconds: the longest that the step should take.
        least_tokens: least size of a slice that is not the rest of its prompt.
        forced: whether the first slice may have `least_tokens` at any cost, and more if that costs little.
    """

    def __init__(self, costs: StepTimes, seconds: float, *, least_tokens: int, forced: bool) -> None:
        self._costs = costs
        self._seconds = seconds
        self._least_tokens = least_tokens
        self._forced = forced

    def tokens(self, work: StepWork, start: int, stop: int) -> int:
        """How many tokens of a prompt from `start` to `stop` may be added to a step with this work; may be 0."""
        tokens = self._most(work, start, stop, self._seconds)
        if tokens >= min(self._least_tokens, stop - start):
            return tokens
        if not self._forced or work.prompt_tokens:
            return 0
        least = min(self._least_tokens, stop - start)
        return max(least, self._most(work, start, stop, FORCED_STRETCH * self._step_s(work, start, start + least)))

    def _most(self, work: StepWork, start: int, stop: int, seconds: float) -> int:
        """The most tokens from `start` on with which the step takes at most `seconds`."""
        if self._step_s(work, start, stop) <= seconds:
            return stop - start
        low, high = 0, stop - start  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._step_s(work, start, start + middle) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def _step_s(self, work: StepWork, start: int, stop: int) -> float:
        pairs = work.pairs + chunk_pairs(start, stop)
        return self._costs.seconds(StepWork(work.decode_rows, work.keys, work.prompt_tokens + stop - start, pairs))


@dataclass(frozen=True, slots=True)
class SlicePace:
    """The speed at which prompts are computed in steps that also decode.

    Args:
        decodes: the decodes of each step.
        slice_tokens: prompt tokens of a step with a slice.
        skips: steps without a slice after each step with one.
    """

    costs: StepCosts
    decodes: StepWork
    slice_tokens: int
    skips: int = 0

    def seconds(self, start: int, stop: int) -> float:
        """The time to compute a prompt's tokens from `start` to `stop` if no other prompt is computed meanwhile."""
        whole, rest = divmod(max(0, stop - start), self.slice_tokens)
        seconds = whole * (self._step_s(self.slice_tokens) + (self.skips * self._step_s(0) if self.skips else 0.0))
        if rest:
            seconds += self._step_s(rest)
        return seconds + self.costs.pair_s * chunk_pairs(start, stop)

    def _step_s(self, tokens: int) -> float:
        return self.costs.seconds(StepWork(self.decodes.decode_rows, self.decodes.keys, tokens))


class Slicer:
    """Makes the bound of each step and counts steps without a slice."""

    def __init__(self) -> None:
        self._skips = 0

    def bound(
        self,
        costs: StepTimes | None,
        work: StepWork,
        streams: Collection[StreamBound],
        *,
        overdue: float,
        drafted: StepWork | None = None,
        wait_s: float = 0.0,
    ) -> StepBound | None:
        """The bound of a step with prompts. Returns None if the step has no bound.

        Args:
            work: the decodes of the step.
            streams: bounds of the running requests.
            overdue: how long the first prompt has waited, in multiples of the time in which its first token should
                come.
            drafted: the same with drafts. These may take longer than that; prompts keep their part of the time above
                the plain step.
            wait_s: for how long the device waits for the step because of drafts, a part of what requests wait for it.
        """
        if costs is None or not work.decode_rows:
            return None
        plain_s = costs.seconds(work)
        seconds = decodes_bound_s(plain_s, streams, overdue=overdue)
        if drafted is not None and seconds > plain_s:
            prompts_s = (1 - DRAFTS_SHARE) * (seconds - plain_s)
            seconds = max(seconds - wait_s, costs.seconds(drafted) + prompts_s)
        forced = self._skips >= SKIPS_MAX
        return StepBound(costs, seconds, least_tokens=MIN_SLICE_TOKENS, forced=forced)

    def pace(
        self, costs: StepCosts, work: StepWork, streams: Collection[StreamBound], *, step_tokens: int
    ) -> SlicePace:
        """The best speed at which prompts are computed next to these decodes: the attention of long prompts makes no
        slice smaller, and streams without a TPOT allow a prompt that has waited the longest steps.

        Args:
            work, streams: as for `bound`.
            step_tokens: most tokens of one step.
        """
        room = max(1, step_tokens - work.decode_rows)
        longest_s = decodes_bound_s(costs.seconds(work), streams, overdue=inf) if work.decode_rows else inf
        if longest_s == inf:
            return SlicePace(costs, work, room)
        without_pairs = replace(costs, pair_s=0.0)
        for forced in (False, True):
            bound = StepBound(without_pairs, longest_s, least_tokens=min(MIN_SLICE_TOKENS, room), forced=forced)
            if slice_tokens := bound.tokens(work, 0, room):
                break
        return SlicePace(costs, work, slice_tokens, skips=SKIPS_MAX if forced else 0)

    def launched(self, *, skipped: bool) -> None:
        """Records a launched step; `skipped`: the first prompt got no slice for lack of time."""
        self._skips = self._skips + 1 if skipped else 0


def decodes_bound_s(plain_s: float, streams: Collection[StreamBound], *, overdue: float = 0.0) -> float:
    """The longest time of a step that gives each of its decoding requests a token.

    Args:
        plain_s: the step's time with nothing but their decodes.
        streams: bounds of the running requests.
        overdue: as for `Slicer.bound`.
    """
    relaxed_s = plain_s * min(1 + max(0.0, overdue), RELAXED_MAX)
    return min((tpot_bound_s(each.tpot_s, plain_s) or each.gap_factor * relaxed_s for each in streams), default=inf)


def tpot_bound_s(tpot_s: float | None, plain_s: float) -> float | None:
    """The longest time of a step that keeps a TPOT. Returns None if there is none, or if decode steps without prompts,
    which take `plain_s`, are far from it."""
    return None if tpot_s is None or plain_s > _OUT_OF_REACH * tpot_s else tpot_s * _TPOT_SHARE
