"""Ends a process, at once or within a bounded time, whatever its threads wait for.

No process of a node runs the interpreter's exit: there NCCL's teardown waits for ranks that are gone, and threads that
wait for a GPU are joined.
"""

import faulthandler
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

END_S = 2.0  # time in which its leader ends a rank that has sent its fault
# Time for the last lines, which a full pipe does not take. Its end replaces the exit code.
WRITE_S = 6.0
# Time to close things in order after an error. Its end replaces the exit code and the reason, so it is only for what
# hangs: on a busy machine closing takes seconds.
CLOSE_S = 20.0


def exit_at_once(code: int) -> NoReturn:
    """Ends this process without cleanup, once its log lines are written. Any thread may call it."""
    exit_within(WRITE_S)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(code)


def exit_within(seconds: float) -> None:
    """Ends this process with exit code 1 after that time, unless it has ended by then. Any thread may call it.

    NOTE: a Python thread would not do: it needs the interpreter, which a call into C may hold for ever.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))


@contextmanager
def ending_soon_if_it_fails() -> Iterator[None]:
    """Lets an error of the block close things in order on its way out, for at most `CLOSE_S`."""
    try:
        yield
    except BaseException:
        exit_within(CLOSE_S)
        raise
