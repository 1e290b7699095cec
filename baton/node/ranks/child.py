"""`python -m baton.node.ranks.child PARENT MODULE ...`: a process that a node starts, and that ends with it from the
start.

It imports nothing large before that: importing torch takes seconds, in which its parent may end.
"""

import ctypes
import os
import signal
import sys
from importlib import import_module

from baton.core.exits import exit_at_once

_PR_SET_PDEATHSIG = 1


def child_command(module: str, *arguments: object) -> list[str]:
    """Starts `module.main(arguments)` as a child of this process. Call it from a thread that lasts as long as this
    process: the child ends with the thread that started it."""
    # NOTE: -P: without it a `models.py` in the user's working directory shadows our package.
    return [sys.executable, "-P", "-m", "baton.node.ranks.child", str(os.getpid()), module, *map(str, arguments)]


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    # A terminal's Ctrl-C and a group's SIGTERM reach every process: rank 0 drains, and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(int(parent))
    import_module(module).main(arguments)


def _end_with(parent: int) -> None:
    """The kernel kills this process when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that was set
        exit_at_once(1)


if __name__ == "__main__":
    main()
