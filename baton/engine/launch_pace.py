"""Times the launch of the next step while one runs: late, so that arriving requests can still join it, but early enough
that the device seldom waits. Pure; times are arguments.

    running step  |--------------------------------------------|
                                    due ^        launched ^    ^ its predicted end
                                        |<--- lead ------------>|

Each launch shows which lead would have been just enough: the time from when it was due to when it was done, with the
delay of timers and threads, and by how much the running step ended before its prediction. The lead is what 49 of 50
launches needed lately, next to steps with prompts or next to others. bench/results/served.md compares other leads.
"""

from bisect import bisect_left, insort
from collections import deque

_SAMPLES_MIN = 8  # before a launch waits
_SAMPLES_MAX = 200
_ENOUGH = 0.98
_RANKS_S = 0.0002  # other ranks launch a little later than the one that measures


class Leads:
    """The leads that launches needed lately, in seconds. A negative one: it would have been in time after the step's
    predicted end."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def enough(self) -> float | None:
        """What 49 of 50 needed. Returns None while few are known."""
        if len(self._sorted) < _SAMPLES_MIN:
            return None
        return self._sorted[int(_ENOUGH * len(self._sorted))]

    def add(self, lead_s: float) -> None:
        if len(self._recent) == _SAMPLES_MAX:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(lead_s)
        insort(self._sorted, lead_s)


class LaunchPace:
    """The times of one engine's launches. Steps start and end in launch order."""

    def __init__(self) -> None:
        self._leads = {True: Leads(), False: Leads()}  # by whether the running step has prompts
        self._begun_s: deque[float] = deque()  # of the steps in flight
        self._last_launched_s = 0.0
        self._started_s = 0.0
        self._known_s = 0.0
        self._predicted_s: float | None = None
        self._has_prompts = False
        self._early_s: tuple[bool, float] | None = None  # of the step before: whether it had prompts, and how early
        self._attempted = False

    @property
    def due_s(self) -> float | None:
        """When to launch the next step. Returns None to launch at once, while costs or times are unknown."""
        lead_s = self._leads[self._has_prompts].enough
        if self._predicted_s is None or lead_s is None:
            return None
        return self._started_s + self._predicted_s - lead_s - _RANKS_S

    def started(self, started_s: float, predicted_s: float | None, *, has_prompts: bool, now: float) -> None:
        """Records that the oldest step in flight started at `started_s`, as seen at `now`."""
        self._started_s, self._known_s, self._predicted_s = started_s, now, predicted_s
        self._has_prompts, self._attempted = has_prompts, False

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
        took_s = max(0.0, launched_s - max(self._begun_s.popleft(), self._last_launched_s))
        self._last_launched_s = launched_s
        if self._early_s is not None:
            had_prompts, early_s = self._early_s
            self._leads[had_prompts].add(took_s + early_s)
        predicted_s = self._predicted_s
        self._early_s = None if predicted_s is None else (self._has_prompts, self._started_s + predicted_s - ended_s)
