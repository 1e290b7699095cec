"""Finds how many CPU cores this process may use: its affinity, and the CPU limit of its container or service."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_OWN_GROUP = "proc/self/cgroup"
_V2 = "sys/fs/cgroup"
_V1 = ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct")


def usable_cores(root: Path = Path("/"), *, affinity: int | None = None) -> float:
    """The number of cores that this process may keep busy; a limit may be a fraction.

    CPU requests and weights do not count: they bind only while others want the same cores.

    Args:
        root: where /proc and /sys are.
        affinity: cores on which the process may run; None: as the system says.
    """
    return min([float(affinity or len(os.sched_getaffinity(0))), *_limits(root)])


def _limits(root: Path) -> Iterator[float]:
    """The CPU limits of this process's group and of all groups above it, in cores."""
    group = _own_group(root)
    for folder in (root / _V2, *_groups(root / _V2, group)):  # a container often sees its own group as the root
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield _cores(quota, period)
    for folder in (root / name for name in _V1):
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            yield _cores(quota, period)


def _own_group(root: Path) -> str:
    """The path of this process's group; empty for version 1 and where it cannot be read."""
    with suppress(OSError):
        for line in (root / _OWN_GROUP).read_text().splitlines():
            if line.startswith("0::/"):
                return line.removeprefix("0::/")
    return ""


def _groups(base: Path, group: str) -> Iterator[Path]:
    parts = Path(group).parts
    if ".." in parts:  # the group is outside of what this container sees
        return
    for number in range(1, len(parts) + 1):
        yield base.joinpath(*parts[:number])


def _cores(quota: str, period: str) -> float:
    """Raises ValueError if there is no limit."""
    cores = int(quota) / int(period) if int(period) > 0 else 0.0
    if cores <= 0:
        raise ValueError(quota)
    return cores
