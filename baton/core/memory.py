"""Finds how much memory this machine has, and this process's container allows."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


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
