"""How long the requests of a step wait for one another's guesses: a step is as long for all of them. Pure."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from baton.engine.scheduling.slices import tpot_bound_s
from baton.engine.speculation.limits import FIRST_LEAD, MOST_LEAD, REGAINED_LEAD


class Lead:
    """For how many plain steps one request may still wait for others' guesses beyond its TPOT; see `limits`.

    Args:
        tokens: number of its known tokens.
        tpot_s: the mean time per token that it must keep; None: there is none.
    """

    def __init__(self, tokens: int, tpot_s: float | None = None) -> None:
        self._tpot_s = tpot_s
        self._steps = FIRST_LEAD if tpot_s is None else 0.0
        self._tokens = tokens

    def after(self, tokens: int, plain_s: float) -> float:
        """The lead when it has so many tokens, if those since the last call of `got` came from plain steps, each of
        which took `plain_s`."""
        each = REGAINED_LEAD
        if self._tpot_s is not None:  # what a plain step leaves of the TPOT
            each = max(0.0, (tpot_bound_s(self._tpot_s, plain_s) or 0.0) / plain_s - 1)
        regained = self._steps + each * max(0, tokens - self._tokens)
        return max(self._steps, min(FIRST_LEAD, regained))

    def got(self, new: int, tokens: int, steps: float, plain_s: float) -> None:
        """Counts a step as long as so many plain steps, which brought `new` of its `tokens`."""
        lead = self.after(tokens - new, plain_s) + new - steps
        self._steps, self._tokens = min(MOST_LEAD, max(0.0, lead)), tokens

    def wait(self, tokens: int, plain_s: float, share: float) -> "Wait":
        """How long it waits when it has so many tokens.

        Args:
            plain_s: time of the step without guesses.
            share: part of what it waits beyond that which is for guesses.
        """
        token_s = tpot_bound_s(self._tpot_s, plain_s) or plain_s
        lead_s = plain_s * self.after(tokens, plain_s)
        return Wait(plain_s + share * max(0.0, token_s - plain_s), share * lead_s)


class Wait(NamedTuple):
    """How long one request lets a step take.

    Args:
        token_s: for each token that it can expect of the step.
        lead_s: in addition.
    """

    token_s: float
    lead_s: float


class Patience(NamedTuple):
    """How long a step may take for guesses.

    Args:
        waits: of each request with a proposal; empty: there is no bound.
        others_s: the longest step for requests that get one token of it.
        all_bear: False: count on no request to get more than one token.
    """

    waits: Sequence[Wait] = ()
    others_s: float = inf
    all_bear: bool = True


NO_BOUND = Patience()
