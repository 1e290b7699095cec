"""Checks that processes do not grow under a light load while others restart again and again.

An allocator may grow once at any time, while a leak continues. So the slope of a straight line through the later
samples is judged.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.chaos.history import Event, FaultBegan, Measured
from tests.chaos.scenario import Fault, Load, Scenario, draw

# These restart in turn; the others live.
RESTARTED = ("p1", "d1", "g1")
_LOAD = Load(clients=2, pause_s=1.0, cancelled=0.1, with_deadline=0.05)
_SETTLED = 1 / 3  # the part of the samples that is left out: allocators and caches fill
MIB_PER_RESTART_MAX, FILES_PER_RESTART_MAX = 1.0, 0.5


@dataclass(frozen=True)
class Slope:
    """One process that has lived through a soak.

    Attributes:
        rss_mib, files: at its end.
    """

    process: str
    minutes: float
    restarts: int
    rss_mib: float
    files: int
    mib_per_restart: float
    files_per_restart: float

    @property
    def flat(self) -> bool:
        return self.mib_per_restart <= MIB_PER_RESTART_MAX and self.files_per_restart <= FILES_PER_RESTART_MAX

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "flat": self.flat}


def soak_scenario(seed: int, *, seconds: float, every_s: float) -> Scenario:
    """A restart of one process every so often, by kill -9 and by SIGTERM in turn."""
    count = int(seconds / every_s)
    faults = tuple(
        Fault(number, ("kill", "drain")[number // len(RESTARTED) % 2], RESTARTED[number % len(RESTARTED)],
              (number + 0.5) * every_s, 0.1)
        for number in range(count)
    )  # fmt: skip
    return replace(draw(seed, seconds=seconds, load=_LOAD), faults=faults, policy="elastic")


def slopes(events: Sequence[Event], *, seconds: float) -> list[Slope]:
    """Of every process that was measured from the first to the last sample as one process."""
    lives: dict[tuple[str, int], list[Measured]] = defaultdict(list)
    for event in events:
        if isinstance(event, Measured):
            lives[event.process, event.pid].append(event)
    restarts = sum(isinstance(event, FaultBegan) for event in events)
    most = max(map(len, lives.values()), default=0)
    found = []
    for (process, _), life in sorted(lives.items()):
        if process in RESTARTED or len(life) < most:
            continue
        later = life[int(len(life) * _SETTLED) :]
        each_s = seconds / max(1, restarts)
        times = [event.at_s for event in later]
        mib, files = (
            slope_of(times, values) * each_s
            for values in ([event.rss_mib for event in later], [float(event.files) for event in later])
        )
        found.append(Slope(process, seconds / 60, restarts, life[-1].rss_mib, life[-1].files, mib, files))
    return found


def slope_of(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the straight line through the values with the least squares, per unit of time; 0 for less than two values."""
    if len(times) < 2:
        return 0.0
    mean_t, mean_v = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - mean_t) ** 2 for time in times)
    return sum((time - mean_t) * (value - mean_v) for time, value in zip(times, values, strict=True)) / spread
