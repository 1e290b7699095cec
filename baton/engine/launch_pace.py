"""Times the launch of the next step while one runs: late, so that arriving requests can still join it, but early enough
that the device does not wait. Pure; times are arguments.

    running step  |--------------------------------------------|
                                    due ^        launched ^    ^ its predicted end
                                        |<--- lead ------>|

The lead is from when a launch was due to when it was done, as measured on earlier steps: with the delay of timers and
threads. How much earlier than predicted steps end is measured as well. Both count with four times their mean deviation,
as the timeouts of TCP do (RFC 6298), so a host or a prediction that varies much leads to launches at once.
"""

from collections import deque

_SAMPLES_MIN = 8  # of both, before a launch waits
_MARGIN = 0.02  # of the predicted time
_MARGIN_S = 0.0005  # other ranks launch a little later than the one that measures
_DEVIATIONS = 4.0
_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4


class Upper:
    """An upper bound on the next value of a series: its moving mean and deviation."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._deviation = 0.0

    @property
    def value(self) -> float:
        return self._mean + _DEVIATIONS * self._deviation

    def add(self, sample: float) -> None:
        self.count += 1
        if self.count == 1:
            self._mean, self._deviation = sample, abs(sample) / 2
            return
        self._deviation += _DEVIATION_GAIN * (abs(sample - self._mean) - self._deviation)
        self._mean += _MEAN_GAIN * (sample - self._mean)


class LaunchPace:
    """The times of one engine's launches. Steps start and end in launch order."""

    def __init__(self) -> None:
        self._lead_s = Upper()
        self._early = Upper()  # as a share of the predicted time
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
        surely_s = self._predicted_s * (1 - _MARGIN - max(0.0, self._early.value))
        return self._started_s + surely_s - _MARGIN_S - self._lead_s.value

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

    def ended(self, *, launched_s: float, ended_s: float) -> None:
        """Records that the oldest step has ended on the device; its launch was done at `launched_s`."""
        # A launch that waited for the one before needs no more lead for that.
        self._lead_s.add(max(0.0, launched_s - max(self._begun_s.popleft(), self._last_launched_s)))
        self._last_launched_s = launched_s
        if self._predicted_s:
            self._early.add(1 - (ended_s - self._started_s) / self._predicted_s)
