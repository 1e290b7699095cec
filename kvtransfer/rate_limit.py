"""A budget of bytes over time: how much of what has arrived may be taken now. Pure; its caller has the clock."""

# What was not used is kept for that long, so that a caller who looks late loses nothing of the rate.
_KEPT_S = 0.02


class RateLimit:
    """Whoever finds the budget not overdrawn may take any number of bytes, and the next one waits until they are paid
    back: the rate holds on average, for messages of any size, and none is too large to be taken at all."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._even_at_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """Until something may be taken; 0 when it may be now."""
        return max(0.0, self._even_at_s - now_s)

    def take(self, num_bytes: int, now_s: float) -> None:
        self._even_at_s = max(self._even_at_s, now_s - _KEPT_S) + num_bytes / self._bytes_per_s
