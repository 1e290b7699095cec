"""How fast a store reads entries, from its latest reads. Pure."""

from collections import deque

# Reads that are older than this are forgotten, so that a store that was slow once is tried again.
_VALID_S = 120.0
_READS_MAX = 64
# From so many reads on their mean counts.
_READS_MIN = 16


class ReadSpeed:
    """The time that a store takes for each entry while it has reads to do, however many run next to each other.

    Attributes:
        total, total_s: entries that were found so far, and the sum of their times.
    """

    def __init__(self) -> None:
        self.total, self.total_s = 0, 0.0
        self._reading = 0
        self._since_s = 0.0
        self._reads: deque[tuple[float, float]] = deque(maxlen=_READS_MAX)  # when each ended, and its seconds

    def begun(self, now_s: float) -> None:
        """Another read has begun."""
        if not self._reading:
            self._since_s = now_s
        self._reading += 1

    def ended(self, now_s: float, *, is_found: bool) -> None:
        """A read has ended. The time since the one before it is its own; that of a miss says nothing."""
        self._reading -= 1
        if is_found:
            self._reads.append((now_s, now_s - self._since_s))
            self.total += 1
            self.total_s += now_s - self._since_s
        self._since_s = now_s

    def entry_s(self, now_s: float) -> float | None:
        """Seconds for each entry. Returns None while too little is measured.

        The longest time does not count: one read that hung for a second would make a fast store seem slow for minutes.
        """
        valid = [seconds for ended_s, seconds in self._reads if now_s - ended_s <= _VALID_S]
        return (sum(valid) - max(valid)) / (len(valid) - 1) if len(valid) >= _READS_MIN else None
