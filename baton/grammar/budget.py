"""Bounds the CPU time that one output's grammar may take on the node that follows it."""

from collections.abc import Callable

from baton.grammar.refusal import refusal

CURE = (
    "simplify it: rules that are not ambiguous (no e: e e), repetitions (x*) or left recursion instead of right"
    " recursion, fewer alternatives"
)
# Masks of large tool lists, schemas and grammars with a vocabulary of 128,000 tokens take 1 ms on average, or less.
_MASK_S = 0.004
# More than the slowest masks of these take; those of a first use, after 10 ms, are among them.
_MORE_S = 0.1
# A mask advances its grammar over all tokens that may come next, as taking a token does over one: before the mask is
# computed, the time of the token is a bound of its time. Of large schemas, a mask takes 5 to 30 times as long.
_MASKS_OF_A_TOKEN = 10


class MaskBudget:
    """Lets each mask take 4 ms on average, and all of them 100 ms more. Once spent, it stays so.

    Args:
        clock: CPU time of the calling thread in seconds; None: there is no bound.
    """

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self.clock = clock
        self._excess_s = 0.0
        self._spent = False

    def charge_mask(self, seconds: float) -> None:
        """Charges the time of one mask."""
        self._excess_s = max(0.0, self._excess_s + seconds - _MASK_S)
        self._spent = self._spent or self._excess_s > _MORE_S

    def charge_token(self, seconds: float) -> None:
        """Charges the time of consuming one token."""
        self.charge_mask(_MASKS_OF_A_TOKEN * seconds)

    def check(self) -> None:
        """Checks that the budget is not spent; raises InvalidRequest otherwise."""
        if self._spent:
            raise refusal(
                "the grammar is too expensive to follow at this length of output",
                value=f"{1e3 * (_MORE_S + _MASK_S):.0f} ms of CPU time and more",
                allowed=(f"{1e3 * _MASK_S:.0f} ms a token on average, and {1e3 * _MORE_S:.0f} ms more in all",),
                cure=CURE,
            )
