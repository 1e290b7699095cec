"""Measures pulls: their fixed cost and rate from one node, and from all nodes together. Pure."""

from collections import deque
from dataclasses import dataclass, field

from baton.core.pull_costs import ASSUMED_PULL, PullCosts

# Measurements older than this are forgotten, so that a link that was slow once is tried again.
_VALID_S = 120.0
_SAMPLES_MAX = 16
# Two pulls show a fixed cost and a rate only if one is this many times as large as the other.
_SPREAD = 2.0


@dataclass(frozen=True)
class PullSample:
    """One pull that was measured."""

    at_s: float
    bytes: int
    seconds: float


@dataclass
class PullSpeed:
    """The fixed cost and rate of pulls from one node, from the latest pulls."""

    samples: deque[PullSample] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))

    def add(self, sample: PullSample) -> None:
        self.samples.append(sample)

    def seconds(self, num_bytes: int, now_s: float) -> float | None:
        """The predicted time of a pull; None if no pull has been measured yet.

        The smallest and the largest pull give fixed cost and rate. Pulls of about the same size give only a rate: a
        larger pull then seems longer than it is, and a smaller one costs at least as much as the shortest pull so far.
        """
        valid = self._valid(now_s)
        if not valid:
            return None
        small, large = min(valid, key=lambda each: each.bytes), max(valid, key=lambda each: each.bytes)
        if large.bytes >= _SPREAD * small.bytes and large.seconds > small.seconds:
            byte_s = (large.seconds - small.seconds) / (large.bytes - small.bytes)
            return max(0.0, small.seconds - byte_s * small.bytes) + byte_s * num_bytes
        return max(small.seconds, large.seconds * num_bytes / large.bytes)

    def mean_costs(self, now_s: float) -> PullCosts | None:
        """Mean costs of pulls, for predictions; None while nothing is measured.

        The fixed part is the assumed one, but at most half of the shortest pull; otherwise bytes could seem to cost
        nothing.
        """
        valid = self._valid(now_s)
        if not valid:
            return None
        fixed_s = min(ASSUMED_PULL.fixed_s, *(each.seconds / 2 for each in valid))
        rest_s = sum(each.seconds for each in valid) - len(valid) * fixed_s
        return PullCosts(fixed_s, rest_s / sum(each.bytes for each in valid))

    def _valid(self, now_s: float) -> list[PullSample]:
        return [sample for sample in self.samples if now_s - sample.at_s <= _VALID_S]
