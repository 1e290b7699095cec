"""How long the requests of a step wait for one another's drafts: a step is as long for all of them. Pure."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.scheduling.slices import tpot_bound_s
from baton.engine.speculation.limits import CREDIT_OF_STEP, FIRST_CREDIT, MOST_CREDIT, REGAINED_CREDIT


class WaitBound(NamedTuple):
    """How long one request lets a step take.

    Args:
        token_s: for each token that it can expect of the step.
        credit_s: in addition.
    """

    token_s: float
    credit_s: float


class WaitBounds(NamedTuple):
    """How long the requests of a step let it take.

    Args:
        own: of each request with a proposal; empty: there is no bound.
        others_s: the longest step for requests that get one token of it.
        all_bear: False: count on no request to get more than one token.
    """

    own: Sequence[WaitBound] = ()
    others_s: float = inf
    all_bear: bool = True

    def longest_s(self, tokens: NDArray[np.float64]) -> float:
        """The longest step that all of them bear.

        Args:
            tokens: that each request of `own` can expect of it.
        """
        if not len(self.own):
            return self.others_s
        token_s, credit_s = np.array(self.own).T
        return min(self.others_s, float((token_s * tokens + credit_s).min()))


NO_BOUND = WaitBounds()


class WaitCredit:
    """For how many plain steps one request may still wait for others' drafts; see `limits`.

    It falls below 0, but not far, where steps took longer than predicted, and where the request waited within its TPOT.

    Args:
        tokens: number of its known tokens.
        tpot_s: the mean time per token that it must keep; None: there is none.
    """

    def __init__(self, tokens: int, tpot_s: float | None = None) -> None:
        self._tpot_s = tpot_s
        self._steps, self._tokens = FIRST_CREDIT, tokens

    def after(self, tokens: int) -> float:
        """The credit when it has so many tokens, if those since the last call of `charge` came from steps without
        drafts."""
        regained = self._steps + REGAINED_CREDIT * max(0, tokens - self._tokens)
        return max(self._steps, min(FIRST_CREDIT, regained))

    def charge(self, new: int, tokens: int, steps: float) -> None:
        """Counts a step as long as so many plain steps, which brought `new` of its `tokens`."""
        credit = self.after(tokens - new) + new - steps
        self._steps, self._tokens = min(MOST_CREDIT, max(-FIRST_CREDIT, credit)), tokens

    def bound(self, tokens: int, plain_s: float, share: float) -> WaitBound:
        """How long it lets a step take when it has so many tokens.

        Args:
            plain_s: time of the step without drafts.
            share: part of the time beyond that which is for drafts.
        """
        credit, token_s = self.after(tokens), tpot_bound_s(self._tpot_s, plain_s)
        if token_s is None:
            token_s = plain_s
        else:  # only what its own drafts have saved is beyond the TPOT
            credit -= FIRST_CREDIT
        credit_s = plain_s * min(CREDIT_OF_STEP, max(0.0, credit))
        return WaitBound(plain_s + share * max(0.0, token_s - plain_s), share * credit_s)
