"""Draws the times at which requests are sent, with a seed; they do not depend on the answers (open loop)."""

import random
from collections.abc import Iterator
from enum import StrEnum

from baton.core.errors import InvalidRequest


class Arrivals(StrEnum):
    POISSON = "poisson"  # independent users
    GAMMA = "gamma"  # bursts: gaps between requests are gamma distributed
    CONSTANT = "constant"  # equal gaps


def arrival_times(
    kind: Arrivals, rate: float, rng: random.Random, *, burstiness: float = 1.0, start_s: float = 0.0
) -> Iterator[float]:
    """Endless times in seconds, ascending, `rate` per second in the mean.

    Args:
        burstiness: for GAMMA, the squared coefficient of variation of the gaps; 1 is Poisson, 4 comes in bursts, 0.25
            is steadier than Poisson.

    Raises:
        InvalidRequest: rate or burstiness is not above 0, or 1e9 or more.
    """
    for name, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < 1e9:
            raise InvalidRequest(
                f"the {name} is {value:g}", field=name, value=value, allowed=("above 0", "below 1e+09")
            )
    return _times(kind, rate, rng, burstiness, start_s)


def _times(kind: Arrivals, rate: float, rng: random.Random, burstiness: float, at_s: float) -> Iterator[float]:
    while True:
        if kind is Arrivals.CONSTANT:
            gap_s = 1 / rate
        elif kind is Arrivals.POISSON:
            gap_s = rng.expovariate(rate)
        else:
            gap_s = rng.gammavariate(1 / burstiness, burstiness / rate)
        at_s += gap_s
        yield at_s
