"""Bounds work for drafts that all requests share, so that no step waits long for it. Pure."""


class Allowance:
    """How much work may still be done for the next step, by all requests together.

    Args:
        most: units of work for one step.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def refill(self) -> None:
        """Allows the work of one more step."""
        self._left = self._most

    def take(self, most: int = 1, *, least: int = 1) -> int:
        """Takes up to `most` units and returns how many were left of them. Takes none and returns 0 if fewer than
        `least` are left."""
        taken = min(most, self._left)
        if taken < least:
            return 0
        self._left -= taken
        return taken
