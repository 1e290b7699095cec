"""Gain and cost of draft tokens on a simulated node. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InvalidRequest
from baton.engine.speculation.limits import LEAST_GAIN, MOST_GUESSES, assumed_wait_s

# Parts of the guesses that a step may take; nodes too take fewer of them the more rows a step has.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_FORM = f"KEPT/TAKEN, such as 0.9/1.4, at most {MOST_GUESSES} taken"


class GuessedStep(NamedTuple):
    """A decode-only step, with or without draft tokens.

    Args:
        seconds: its time.
        tokens: mean number of tokens per request.
        rise_s: extra time of the next step, because contexts have grown.
    """

    seconds: float
    tokens: float
    rise_s: float


@dataclass(frozen=True)
class Guesses:
    """Mean draft tokens of a request in a step that gives it tokens.

    Args:
        kept: draft tokens accepted.
        taken: draft tokens verified; 0: no speculation.
    """

    kept: float = 0.0
    taken: float = 0.0

    def __str__(self) -> str:
        return f"{self.kept:.2f} of {self.taken:.2f} draft tokens accepted per step"

    def step(self, costs: StepCosts, work: StepWork, *, seats: int) -> GuessedStep:
        """The decode-only step with the most tokens per second, with or without draft tokens, as nodes choose it.

        Args:
            work: one token of each request.
            seats: maximum rows of a step; each draft token takes one.
        """
        best = GuessedStep(costs.seconds(work), 1.0, costs.key_s * work.decode_rows)
        least = LEAST_GAIN / best.seconds
        for share in _SHARES if self.taken else ():
            rows = work.decode_rows * (1 + share * self.taken)
            if rows > seats:
                break
            keys = work.keys * (1 + share * self.taken)
            seconds = costs.seconds(StepWork(round(rows), round(keys))) + assumed_wait_s(round(rows))
            tokens = 1 + share * self.kept
            if tokens / seconds > least:
                best, least = GuessedStep(seconds, tokens, costs.key_s * rows * tokens), tokens / seconds
        return best


NO_GUESSES = Guesses()


def parse_guesses(text: str) -> Guesses:
    """Parse mean draft tokens in the form KEPT/TAKEN.

    Raises:
        InvalidRequest: it has another form, or more are kept than taken.
    """
    kept, _, taken = text.partition("/")
    try:
        guesses = Guesses(float(kept), float(taken))
    except ValueError:
        guesses = None
    if guesses is None or not 0 <= guesses.kept <= guesses.taken <= MOST_GUESSES:
        raise InvalidRequest(
            f"--guesses {text!r} is not {_FORM}", field="guesses", value=text, allowed=(_FORM,),
            cure="`baton status --json` of a node has accepted_tokens_total and drafted_tokens_total; divide both by "
            "the generated tokens that were not accepted draft tokens",
        )  # fmt: skip
    return guesses


def measured_guesses(*, generated: int, drafted: int, accepted: int) -> Guesses:
    """Mean draft tokens of a node, from its counters."""
    rows = generated - accepted
    return Guesses(accepted / rows, drafted / rows) if rows > 0 and 0 < accepted <= drafted else NO_GUESSES
