"""How long the requests of a step wait for one another's guesses: a step is as long for all of them. Pure."""

from collections.abc import Collection, Sequence
from math import inf
from typing import NamedTuple

from baton.engine.scheduling.slices import StreamBound, decodes_bound_s
from baton.engine.speculation.limits import FIRST_LEAD, MOST_LEAD, REGAINED_LEAD


class Lead:
    """For how many plain steps one request may still wait for others' guesses; see `limits`.

    Args:
        tokens: number of its known tokens.
    """

    def __init__(self, tokens: int) -> None:
        self._steps, self._tokens = FIRST_LEAD, tokens

    def after(self, tokens: int) -> float:
        """The lead when it has so many tokens, if those since the last call of `got` came from plain steps."""
        regained = self._steps + REGAINED_LEAD * max(0, tokens - self._tokens)
        return max(self._steps, min(FIRST_LEAD, regained))

    def got(self, new: int, tokens: int, steps: float) -> None:
        """Counts a step as long as so many plain steps, which brought `new` of its `tokens`."""
        lead = self.after(tokens - new) + new - steps
        self._steps, self._tokens = min(MOST_LEAD, max(0.0, lead)), tokens


class Patience(NamedTuple):
    """How long a step may take for the guesses of others.

    Args:
        token_s: most time for each token that a request can expect of the step.
        leads_s: of each request with a proposal, how much longer it can wait; empty: none can.
        others_lead_s: the same of the requests without a proposal; the least of them.
        all_bear: False: count on no request to get more than one token.
    """

    token_s: float = inf
    leads_s: Sequence[float] = ()
    others_lead_s: float = 0.0
    all_bear: bool = True


NO_BOUND = Patience()


def patience_of(
    leads: Sequence[float],
    others: Sequence[float],
    plain_s: float,
    streams: Collection[StreamBound],
    *,
    share: float = 1.0,
    all_bear: bool = True,
) -> Patience:
    """The patience of a step's requests.

    Args:
        leads, others: the leads of requests with and without a proposal.
        plain_s: time of the step without guesses.
        streams: bounds of the running requests. One without a TPOT has no time to spare but its lead.
        share: part of the time above that of the plain step which guesses may take.
    """
    if not streams:
        return NO_BOUND
    bound_s = decodes_bound_s(plain_s, [each._replace(gap_factor=1.0) for each in streams])
    return Patience(
        plain_s + share * max(0.0, bound_s - plain_s),
        [share * plain_s * lead for lead in leads],
        share * plain_s * min(others, default=0.0),
        all_bear,
    )
