"""How a node's process ends: at once, and within a bounded time, whatever its threads wait for.

No process of a node runs the interpreter's exit: there NCCL's teardown waits for ranks that are gone, and threads that
wait for a GPU are joined. Nor does an end need the main thread: it may be in a call that runs no Python, such as those
in which ranks wait for each other.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

# For the last lines, which a full pipe does not take, and for the end of child processes.
END_S = 2.0


def exit_at_once(code: int) -> NoReturn:
    """Ends this process without cleanup, once its log lines are written. Any thread may call it."""
    exit_within(END_S)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a pipe that nobody reads any more
            stream.flush()
    os._exit(code)


def exit_within(seconds: float) -> None:
    """Ends this process with exit code 1 after that time, unless it has ended by then. Any thread may call it.

    NOTE: a thread of Python's own would not do: it needs the interpreter, which a call into C may hold for ever.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))


@contextmanager
def ending_soon_if_it_fails() -> Iterator[None]:
    """An error of the block may close things in order on its way out, but not for longer than `END_S`."""
    try:
        yield
    except BaseException:
        exit_within(END_S)
        raise


@contextmanager
def ending_at_signals() -> Iterator[None]:
    """Inside it, SIGTERM and SIGINT end this process at once with exit code 0: nothing is served yet, and other ranks
    end with it. Both must have Python handlers, which then may not run. On the main thread only."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    thread = threading.Thread(target=_end_at_signals, args=(ours,), name="signals", daemon=True)
    thread.start()
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # else it is ignored, or someone else's
        signal.signal(signal.SIGINT, lambda *_: None)
    # NOTE: the C part of Python's handlers writes the signal's number there, whatever the main thread does.
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, interrupt)
        theirs.close()
        thread.join()
        ours.close()


def end_at_once() -> None:
    exit_at_once(0)


def _end_at_signals(signals: socket.socket) -> None:
    while numbers := signals.recv(1):
        if numbers[0] == signal.SIGINT:
            logging.getLogger("baton").info("interrupted")
        if numbers[0] in (signal.SIGTERM, signal.SIGINT):
            exit_at_once(0)
