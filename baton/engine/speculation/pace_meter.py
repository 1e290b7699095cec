"""Measures what speculation makes of decode steps: how long these take, and how many tokens they bring. Pure."""

from baton.core.decode_pace import PLAIN_PACE, DecodePace

# Steps over which the means go, and those with prompts.
_MEMORY, _PROMPTS_MEMORY = 128, 32
# Where fewer of the steps had drafts, all count as plain.
_LEAST_DRAFTED = 0.01


class _Mean:
    """A mean in which each value weighs less than the one after it."""

    def __init__(self, memory: int, value: float) -> None:
        self.value = value
        self._memory, self._weight = memory, 0.0

    def add(self, value: float) -> None:
        self._weight += 1 - self._weight / self._memory
        self.value += (value - self.value) / self._weight


class PaceMeter:
    """The decode steps of one engine."""

    def __init__(self) -> None:
        self._ratio, self._tokens, self._drafted = (_Mean(_MEMORY, value) for value in (1.0, 1.0, 0.0))
        self._prompts_ratio = _Mean(_PROMPTS_MEMORY, 1.0)

    def add(self, ratio: float, tokens: float, *, drafts: bool, prompts: bool = False) -> None:
        """Counts a step.

        Args:
            ratio, tokens: as in `DecodePace`.
            drafts: whether it had drafts.
            prompts: whether it also computed prompts.
        """
        self._ratio.add(ratio)
        self._tokens.add(tokens)
        self._drafted.add(drafts)
        if prompts:
            self._prompts_ratio.add(ratio)

    @property
    def pace(self) -> DecodePace:
        """The pace of the latest steps."""
        if self._drafted.value <= _LEAST_DRAFTED:
            return PLAIN_PACE
        return DecodePace(self._ratio.value, self._tokens.value, self._prompts_ratio.value)
