"""`python -m baton.node.ranks.child PARENT MODULE ...`: a child process of a node, which ends when its parent ends.

It arranges this before it imports anything large: torch takes seconds to import, and the parent may end meanwhile.
"""

import ctypes
import os
import signal
import sys
from importlib import import_module

from baton.core.exits import exit_at_once

_PR_SET_PDEATHSIG = 1


def child_command(module: str, *arguments: object) -> list[str]:
    """The command line that runs `module.main(arguments)` as a child of this process.

    Start it from a thread that lasts as long as this process, because the child ends with the thread that started it.
    """
    # NOTE: without -P, a module in the user's working directory may shadow one that we import.
    return [sys.executable, "-P", "-m", "baton.node.ranks.child", str(os.getpid()), module, *map(str, arguments)]


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    # A terminal's Ctrl-C and a group's SIGTERM reach every process: rank 0 drains, and then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with(int(parent))
    import_module(module).main(arguments)


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        exit_at_once(1)


if __name__ == "__main__":
    main()
