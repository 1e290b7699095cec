"""Virtual time. Actions run in the order of their times, and in the order of their creation where times are equal."""

import heapq
from collections.abc import Callable

from tests.simulation.invariants import violated

Action = Callable[[], object]


class Clock:
    """Stands still until the next action's time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._made = 0

    def at(self, when_s: float, action: Action) -> None:
        """Schedules the action; a time in the past means at once."""
        heapq.heappush(self._heap, (when_s if when_s > self.now_s else self.now_s, self._made, action))
        self._made += 1

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now_s + delay_s, action)

    def step(self) -> bool:
        """Runs the next action; False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        return True


class Timer:
    """Calls a machine at its deadline.

    Args:
        run: runs an action in the machine's process.
        deadline_s: returns the machine's present deadline.
        on_time: delivers the event to the machine, which must move its deadline to a later time.
    """

    def __init__(
        self,
        clock: Clock,
        run: Callable[[Action], None],
        deadline_s: Callable[[], float | None],
        on_time: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._run = run
        self._deadline_s = deadline_s
        self._on_time = on_time
        self._armed_s: float | None = None

    def arm(self) -> None:
        """Must be called whenever the deadline may have become earlier."""
        deadline_s = self._deadline_s()
        if deadline_s is not None and (self._armed_s is None or deadline_s < self._armed_s):
            self._armed_s = deadline_s
            self._clock.at(deadline_s, lambda: self._run(lambda: self._fire(deadline_s)))

    def _fire(self, armed_s: float) -> None:
        if self._armed_s != armed_s:
            return
        self._armed_s = None
        deadline_s = self._deadline_s()
        if deadline_s is not None and deadline_s <= self._clock.now_s:
            self._on_time()
            deadline_s = self._deadline_s()
            if deadline_s is not None and deadline_s <= self._clock.now_s:
                violated("I5", f"the deadline of {deadline_s} s has not moved after its event")
        self.arm()
