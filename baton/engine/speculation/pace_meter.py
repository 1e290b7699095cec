"""Measures what guesses make of decode steps: how long these take, and how many tokens they bring. Pure."""

from baton.core.decode_pace import PLAIN_PACE, DecodePace

# Steps over which the means go.
_MEMORY = 128
# Where fewer of them had guesses, the steps count as plain.
_LEAST_GUESSED = 0.01


class PaceMeter:
    """The decode steps of one engine, each with those before it at a weight that falls."""

    def __init__(self) -> None:
        self._steps = self._ratios = self._tokens = self._guessed = 0.0

    def add(self, ratio: float, tokens: float, *, guesses: bool) -> None:
        """Counts a step.

        Args:
            ratio, tokens: as in `DecodePace`.
            guesses: whether it had guesses.
        """
        kept = 1 - 1 / _MEMORY
        self._steps = kept * self._steps + 1
        self._ratios = kept * self._ratios + ratio
        self._tokens = kept * self._tokens + tokens
        self._guessed = kept * self._guessed + guesses

    @property
    def pace(self) -> DecodePace:
        """The pace of the latest steps."""
        if self._guessed <= _LEAST_GUESSED * self._steps:
            return PLAIN_PACE
        return DecodePace(self._ratios / self._steps, self._tokens / self._steps)
