"""The times of steps that are simulated together, because they only decode and are alike. Pure.

The n-th of them takes `first_s + n * rise_s`, because every row reads one key more.
"""

import math
from dataclasses import dataclass

from baton.planner.job import PlanJob


@dataclass(slots=True)
class StepRun:
    """Running steps: `count` equal ones, or one with prompts.

    Args:
        tokens: of each request in a step with draft tokens, which is simulated as that many steps; its tokens arrive
            together.
    """

    started_s: float
    count: int
    first_s: float
    rise_s: float
    slices: list[tuple[PlanJob, int]]
    tokens: float = 1.0

    def seconds(self, count: int) -> float:
        return count * self.first_s + self.rise_s * count * (count - 1) / 2

    def ended_by(self, now_s: float) -> int:
        """The number of its steps that have ended."""
        passed_s = max(0.0, now_s - self.started_s)
        if self.rise_s * self.count < 1e-3 * self.first_s:
            number = int(passed_s / (self.first_s + self.rise_s * (self.count - 1) / 2))
        else:
            half = self.first_s / self.rise_s - 0.5
            number = int(math.sqrt(half * half + 2 * passed_s / self.rise_s) - half)
        while self.seconds(number) > passed_s:
            number -= 1
        while self.seconds(number + 1) <= passed_s:
            number += 1
        return min(self.count, number)
