"""Timing of the transfer thread: a rate limit on bytes, and punctual wake-ups by Linux."""

import ctypes

# Unused budget is kept this long, so that a caller that is a little late still reaches the full rate.
_KEPT_S = 0.02


class RateLimit:
    """Limits the average rate of bytes, for messages of any size.

    A message may be received while the budget is not overdrawn; the next one waits until the debt is paid back. So no
    message is too large to be received.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._even_at_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        """Time until a message may be received; 0 if it may be received now."""
        return max(0.0, self._even_at_s - now_s)

    def take(self, num_bytes: int, now_s: float) -> None:
        self._even_at_s = max(self._even_at_s, now_s - _KEPT_S) + num_bytes / self._bytes_per_s


_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1000


def wake_punctually() -> None:
    """Lets the calling thread sleep for microseconds; by default Linux wakes it up to 50 us late."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)
