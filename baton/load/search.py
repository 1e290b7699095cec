"""Finds the highest rate that meets a goal, by bisection, for several goals at once. Pure: rates out, counts in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

CONFIRMATIONS = 2  # runs at the highest good rate, with all requests together, before it is believed


@dataclass
class GoalSearch:
    """The bracket of one goal.

    Args:
        share: share of good requests that a rate needs.
        precision: relative width of the bracket at which the search ends.
    """

    share: float
    start: float
    precision: float
    rate_min: float
    rate_max: float
    counts: dict[float, tuple[int, int, int]] = field(default_factory=dict)  # by rate: runs, good requests, all

    def observe(self, rate: float, good: int, total: int) -> None:
        runs, good_before, total_before = self.counts.get(rate, (0, 0, 0))
        self.counts[rate] = (runs + 1, good_before + good, total_before + total)

    @property
    def high(self) -> float:
        """The lowest rate that failed; infinite if none did."""
        return min((rate for rate in self.counts if not self._passes(rate)), default=math.inf)

    @property
    def low(self) -> float:
        """The highest rate that passed, below every rate that failed; 0 if none did."""
        return max((rate for rate in self.counts if rate < self.high and self._passes(rate)), default=0.0)

    def next_rate(self) -> float | None:
        """The rate to measure next. Returns None if `low` is the answer."""
        low, high = self.low, self.high
        if low == 0.0 and high == math.inf:
            return self.start
        if low == 0.0:
            return None if high <= self.rate_min else max(self.rate_min, high / 2)
        if high == math.inf and low < self.rate_max:
            return min(self.rate_max, 2 * low)
        if high > (1 + self.precision) * low and low < self.rate_max:
            return math.sqrt(low * high)
        return low if self.counts[low][0] < CONFIRMATIONS else None

    def _passes(self, rate: float) -> bool:
        _, good, total = self.counts[rate]
        return total > 0 and good >= self.share * total


@dataclass
class RateSearch:
    """Searches for all goals; each measured rate serves every one of them."""

    goals: list[GoalSearch]
    runs_max: int
    runs: int = 0

    @classmethod
    def of(
        cls, shares: Sequence[float], *, start: float, precision: float, rate_max: float = 1e6, runs_max: int = 100
    ) -> "RateSearch":
        rate_min = start / 1024
        return cls([GoalSearch(share, start, precision, rate_min, rate_max) for share in shares], runs_max)

    def next_rate(self) -> float | None:
        """The rate to measure next. Returns None if every goal has its answer, or `runs_max` runs were made."""
        if self.runs >= self.runs_max:
            return None
        rates = [rate for goal in self.goals if (rate := goal.next_rate()) is not None]
        # The lowest rate first: it does not overload the server, and often answers for the other goals too.
        return min(rates, default=None)

    def observe(self, rate: float, good: Sequence[int], total: int) -> None:
        """Adds the result of a run at a rate.

        Args:
            good: for each goal, how many of the run's `total` requests met it.
        """
        self.runs += 1
        for goal, count in zip(self.goals, good, strict=True):
            goal.observe(rate, count, total)
