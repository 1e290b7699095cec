"""Distributions of the tokens of prompts and outputs: fixed, uniform or lognormal, drawn with a seed."""

import math
import random
from dataclasses import dataclass

from baton.core.errors import InvalidRequest

FORMS = ("256", "4096-8192", "lognormal:250,0.6")  # as the command line takes them


@dataclass(frozen=True)
class Fixed:
    tokens: int

    def draw(self, rng: random.Random) -> int:  # noqa: ARG002 - every distribution draws alike
        return self.tokens

    def __str__(self) -> str:
        return str(self.tokens)


@dataclass(frozen=True)
class Uniform:
    """All whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Lognormal:
    """Numbers whose logarithm is normal.

    Args:
        mean: mean of the numbers themselves, not of their logarithm.
        sigma: standard deviation of the logarithm; 0.6 puts 90 % between 0.3 and 2.2 times the mean.
    """

    mean: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(rng.lognormvariate(mu, self.sigma)))

    def __str__(self) -> str:
        return f"lognormal:{self.mean:g},{self.sigma:g}"


Lengths = Fixed | Uniform | Lognormal


def parse_lengths(text: str) -> Lengths:
    """The distribution that a text of one of `FORMS` names.

    Raises:
        InvalidRequest: it is none of them, or no length of it would be at least 1.
    """
    wrong = InvalidRequest(f"lengths {text!r} are not known", field="lengths", value=text, allowed=FORMS)
    try:
        if text.startswith("lognormal:"):
            mean, sigma = map(float, text.removeprefix("lognormal:").split(","))
            if not (1 <= mean < 1e7 and 0 <= sigma <= 5):
                raise wrong
            return Lognormal(mean, sigma)
        low, high = (int(part) for part in text.split("-")) if "-" in text else (int(text), int(text))
    except ValueError:
        raise wrong from None
    if not 1 <= low <= high:
        raise wrong
    return Fixed(low) if low == high else Uniform(low, high)
