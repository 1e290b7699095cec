"""Decides whether entries of another node are worth to be pulled: measured pulls against predicted steps. Pure."""

from collections import deque
from dataclasses import dataclass, field

# Where nothing is measured, fewer tokens than these are computed.
UNMEASURED_TOKENS = 512
# A pull must be predicted to take less than this share of the time to compute its tokens: their load into the cache and
# the place of the prompt in the queue, which a pull delays, cost time too.
_SHARE = 0.7
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
        """The predicted time of a pull; None while nothing is measured.

        The smallest and the largest pull give fixed cost and rate. Pulls of about one size give a rate only: a larger
        pull then seems longer than it is, and a smaller one costs at least as much as the shortest pull so far.
        """
        valid = [sample for sample in self.samples if now_s - sample.at_s <= _VALID_S]
        if not valid:
            return None
        small, large = min(valid, key=lambda each: each.bytes), max(valid, key=lambda each: each.bytes)
        if large.bytes >= _SPREAD * small.bytes and large.seconds > small.seconds:
            byte_s = (large.seconds - small.seconds) / (large.bytes - small.bytes)
            return max(0.0, small.seconds - byte_s * small.bytes) + byte_s * num_bytes
        return max(small.seconds, large.seconds * num_bytes / large.bytes)


def is_worth_pulling(tokens: int, pull_s: float | None, compute_s: float | None) -> bool:
    """Whether to pull that many tokens.

    Args:
        pull_s: predicted time of the pull; None: unknown.
        compute_s: predicted time to compute the tokens; None: unknown.
    """
    if pull_s is None or compute_s is None:
        return tokens >= UNMEASURED_TOKENS
    return pull_s < _SHARE * compute_s
