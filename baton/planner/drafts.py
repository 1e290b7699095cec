"""Gain and cost of draft tokens on a simulated node. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from baton.core.costs import StepCosts, StepWork
from baton.core.errors import InvalidRequest
from baton.engine.speculation.limits import LEAST_GAIN, MOST_DRAFTS, assumed_wait_s

# Parts of the draft tokens that a step may take; nodes too take fewer of them the more rows a step has.
_SHARES = (0.25, 0.5, 0.75, 1.0)
_FORM = f"ACCEPTED/DRAFTED, such as 0.9/1.4, at most {MOST_DRAFTS} drafted"


class SpeculativeStep(NamedTuple):
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
class MeanDrafts:
    """Mean draft tokens of a request in a step that gives it tokens.

    Args:
        accepted: draft tokens that become tokens of the output.
        drafted: draft tokens that the step verifies; 0: no speculation.
    """

    accepted: float = 0.0
    drafted: float = 0.0

    def __str__(self) -> str:
        return f"{self.accepted:.2f} of {self.drafted:.2f} draft tokens accepted per step"

    def step(self, costs: StepCosts, work: StepWork, *, seats: int) -> SpeculativeStep:
        """The decode-only step with the most tokens per second, with or without draft tokens, as nodes choose it.

        Args:
            work: one token of each request.
            seats: maximum rows of a step; each draft token takes one.
        """
        best = SpeculativeStep(costs.seconds(work), 1.0, costs.key_s * work.decode_rows)
        least = LEAST_GAIN / best.seconds
        for share in _SHARES if self.drafted else ():
            rows = work.decode_rows * (1 + share * self.drafted)
            if rows > seats:
                break
            keys = work.keys * (1 + share * self.drafted)
            seconds = costs.seconds(StepWork(round(rows), round(keys))) + assumed_wait_s(round(rows))
            tokens = 1 + share * self.accepted
            if tokens / seconds > least:
                best, least = SpeculativeStep(seconds, tokens, costs.key_s * rows * tokens), tokens / seconds
        return best


NO_DRAFTS = MeanDrafts()


def parse_drafts(text: str) -> MeanDrafts:
    """Parse mean draft tokens in the form ACCEPTED/DRAFTED.

    Raises:
        InvalidRequest: it has another form, or more are accepted than drafted.
    """
    accepted, _, drafted = text.partition("/")
    try:
        drafts = MeanDrafts(float(accepted), float(drafted))
    except ValueError:
        drafts = None
    if drafts is None or not 0 <= drafts.accepted <= drafts.drafted <= MOST_DRAFTS:
        raise InvalidRequest(
            f"--draft-tokens {text!r} is not {_FORM}", field="draft_tokens", value=text, allowed=(_FORM,),
            cure="`baton status --json` of a node has accepted_tokens_total and drafted_tokens_total; divide both by "
            "the generated tokens that were not accepted draft tokens",
        )  # fmt: skip
    return drafts


def measured_drafts(*, generated: int, drafted: int, accepted: int) -> MeanDrafts:
    """Mean draft tokens of a node, from its counters."""
    rows = generated - accepted
    return MeanDrafts(accepted / rows, drafted / rows) if rows > 0 and 0 < accepted <= drafted else NO_DRAFTS
