"""Finds how much memory this machine has, and this process's container allows, and how much of it is free."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# Next to each limit: the memory in use, and the name in memory.stat of the part that the kernel frees on demand.
_USED = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
_MEMINFO = Path("/proc/meminfo")


def memory_limit_bytes(files: Sequence[Path] = CGROUP_LIMITS) -> int:
    """The lower of the machine's memory and the container's limit, in bytes.

    Args:
        files: files with the container's limit; missing ones, and ones that say "max", are ignored.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in files:
        with suppress(OSError, ValueError):
            limits.append(int(path.read_text()))
    return min(limits)


def free_memory_bytes(files: Sequence[Path] = CGROUP_LIMITS, meminfo: Path = _MEMINFO) -> int:
    """The memory that this process could take now, in bytes: what is free here, and what the container's limit leaves.

    Files that the kernel has cached count as free.

    Args:
        files: see `memory_limit_bytes`; the files with the memory in use are in the same directory.
    """
    free = [memory_limit_bytes(files)]
    with suppress(OSError, StopIteration):
        free.append(_value_of("MemAvailable:", meminfo) << 10)
    for path in files:
        used, cached = _USED[path.name]
        with suppress(OSError, ValueError):
            in_use = int((path.parent / used).read_text())
            with suppress(OSError, StopIteration):
                in_use -= _value_of(cached, path.parent / "memory.stat")
            free.append(int(path.read_text()) - in_use)
    return max(0, min(free))


def _value_of(name: str, path: Path) -> int:
    """The number after a name at the start of a line. Raises StopIteration if there is none."""
    pattern = re.compile(rf"{re.escape(name)}\s+(\d+)")
    return next(int(found[1]) for line in path.read_text().splitlines() if (found := pattern.match(line)))
