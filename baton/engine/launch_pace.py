"""Times the launch of the next step while one runs: late, so that arriving requests can still join it, but early enough
that the device does not wait. Pure; times are arguments.

    running step  |--------------------------------------------|
                                    due ^        launched ^    ^ its predicted end
                                        |<--- lead ------>|

The lead is from when a launch was due to when it was done, as measured on earlier steps: with the delay of timers and
threads. How much earlier than predicted steps end is measured on the device, whose times vary less than when their ends
are seen. Of the last `_SAMPLES_MAX` of both, the longest but one in twenty counts: a later launch costs the device a
part of a millisecond, and an earlier one costs each arriving request that time.
"""

from bisect import bisect_left, insort
from collections import deque

_SAMPLES_MIN = 8  # of both, before a launch waits
_SAMPLES_MAX = 64
_QUANTILE = 0.95
# Ends of steps are seen up to this much late, and other ranks launch a little later than the one that measures.
_MARGIN_S = 0.0003


class Recent:
    """The last `_SAMPLES_MAX` values of a series."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def count(self) -> int:
        return len(self._values)

    @property
    def most(self) -> float:
        """What all values but one in twenty are at most. There is at least one value."""
        return self._sorted[int(_QUANTILE * len(self._sorted))]

    def add(self, value: float) -> None:
        if len(self._values) == _SAMPLES_MAX:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)


class LaunchPace:
    """The times of one engine's launches. Steps start and end in launch order."""

    def __init__(self) -> None:
        self._lead_s = Recent()
        self._early = Recent()  # as a share of the predicted time
        self._begun_s: deque[float] = deque()  # of the steps in flight
        self._last_launched_s = 0.0
        self._started_s = 0.0
        self._known_s = 0.0
        self._predicted_s: float | None = None
        self._attempted = False

    @property
    def due_s(self) -> float | None:
        """When to launch the next step. Returns None to launch at once, while costs or times are unknown."""
        if self._predicted_s is None or min(self._lead_s.count, self._early.count) < _SAMPLES_MIN:
            return None
        surely_s = self._predicted_s * (1 - max(0.0, self._early.most))
        return self._started_s + surely_s - _MARGIN_S - self._lead_s.most

    def started(self, started_s: float, predicted_s: float | None, *, now: float) -> None:
        """Records that the oldest step in flight started at `started_s`, as seen at `now`."""
        self._started_s, self._known_s, self._predicted_s = started_s, now, predicted_s
        self._attempted = False

    def begin(self, *, now: float) -> float:
        """Records an attempt to launch a step. Returns when the launch was due."""
        due_s = self.due_s
        first, self._attempted = not self._attempted, True
        return max(due_s, self._known_s) if first and due_s is not None and due_s < now else now

    def launched(self, begun_s: float) -> None:
        """Records that a step whose launch was due at `begun_s` is on its way to the device."""
        self._begun_s.append(begun_s)

    def ended(self, *, launched_s: float, seconds: float) -> None:
        """Records that the oldest step has ended on the device, which computed for `seconds`; its launch was done at
        `launched_s`."""
        # A launch that waited for the one before needs no more lead for that.
        self._lead_s.add(max(0.0, launched_s - max(self._begun_s.popleft(), self._last_launched_s)))
        self._last_launched_s = launched_s
        if self._predicted_s:
            self._early.add(1 - seconds / self._predicted_s)
