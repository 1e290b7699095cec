"""Finds processes that a signal such as SIGSTOP has stopped, so that they neither run nor exit."""

from collections.abc import Iterable
from typing import ClassVar

import psutil


class StoppedFor:
    """Finds the processes that were stopped at several looks in a row; look once in each interval.

    One look is not enough: a terminal's Ctrl-Z stops a whole node, and `fg` continues its processes one after another.
    """

    INTERVAL_S: ClassVar[float] = 1.0
    _LOOKS: ClassVar[int] = 3

    def __init__(self, pids: Iterable[int]) -> None:
        self._looks = dict.fromkeys(pids, 0)

    def first(self) -> int | None:
        """A process that has been stopped for a while. Returns None if there is none."""
        for pid in self._looks:
            self._looks[pid] = self._looks[pid] + 1 if _is_stopped(pid) else 0
        return next((pid for pid, looks in self._looks.items() if looks >= self._LOOKS), None)


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
