"""One measurement, and the rows of a table of measurements."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.attention.measure import Ceilings
from bench.table import Row

MAX_ERROR = 1e-2


@dataclass(frozen=True)
class Work:
    """The work that is measured.

    Attributes:
        name: such as "GQA decode".
        size: such as "B 64, context 4096".
        num_bytes: the least number of bytes to move.
        num_flops: the least number of operations.
    """

    name: str
    size: str
    num_bytes: float
    num_flops: float

    def bound_by_memory(self, machine: Ceilings) -> bool:
        return self.num_bytes / machine.copy_gigabytes_per_s > self.num_flops / machine.matmul_teraflops / 1e3


@dataclass(frozen=True)
class Goal:
    """The wanted share of the rival's speed."""

    rival: str
    share: float


def rows_of(work: Work, us_of: Mapping[str, float], ours: str, goals: Sequence[Goal], machine: Ceilings) -> list[Row]:
    """Compares ours with every rival, the fastest first, and then with the machine's limits."""
    if ours not in us_of:
        return []
    us = us_of[ours]
    size = f"{work.size} ({work.num_bytes / us / 1e3:.0f} GB/s, {work.num_flops / us / 1e6:.0f} TFLOPS)"
    wanted = {goal.rival: goal.share for goal in goals}
    rows = [
        Row(f"{work.name}, {ours}", size, us, "us", rival, us_of[rival], goal=wanted.get(rival), less_is_better=True)
        for rival in sorted(us_of, key=us_of.__getitem__)
        if rival != ours
    ]
    return [*rows, _beside_machine(work, ours, us, machine)]


def default_row(work: Work, us_of: Mapping[str, float], default: str, share: float) -> Row:
    """Compares the selected backend with the fastest of all; infinite if the selected one was left out."""
    best = min(us_of, key=us_of.__getitem__)
    return Row(
        f"{work.name}, the default: {default}",
        work.size,
        us_of.get(default, math.inf),
        "us",
        f"the best, {best}",
        us_of[best],
        goal=share,
        less_is_better=True,
    )


def moved_row(work: Work, us: float, goal: float, machine: Ceilings) -> Row:
    """Compares a kernel that only moves bytes with a copy of as many bytes."""
    rate = work.num_bytes / us / 1e3
    return Row(work.name, f"{work.size} ({us:.0f} us)", rate, "GB/s", "a copy", machine.copy_gigabytes_per_s, goal=goal)


def _beside_machine(work: Work, ours: str, us: float, machine: Ceilings) -> Row:
    name = f"{work.name}, {ours}"
    if work.bound_by_memory(machine):
        rate = work.num_bytes / us / 1e3
        return Row(name, work.size, rate, "GB/s", "a copy", machine.copy_gigabytes_per_s)
    return Row(name, work.size, work.num_flops / us / 1e6, "TFLOPS", "a matmul", machine.matmul_teraflops)
