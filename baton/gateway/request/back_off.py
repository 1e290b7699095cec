"""Pauses between the attempts of one request: each about twice as long as the one before, up to a bound. Pure.

Jittered, so that requests that failed together do not come back together. The jitter follows from the request's id.
"""

from zlib import crc32

_FIRST_S, _MOST_S = 0.1, 2.0


class BackOff:
    """The pauses of one request."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._pauses = 0
        self._most_s = _FIRST_S

    def next_s(self) -> float:
        """The next pause: between half of its bound and all of it."""
        self._pauses += 1
        jitter = crc32(f"{self._request_id}/{self._pauses}".encode(errors="replace")) / (1 << 32)
        pause_s = self._most_s * (1 + jitter) / 2
        self._most_s = min(2 * self._most_s, _MOST_S)
        return pause_s

    def reset(self) -> None:
        """The request has gone on: the next pause is a first one again."""
        self._most_s = _FIRST_S
