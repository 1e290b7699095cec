"""Signals before a node serves: its end, also while the main thread is in a call that runs no Python.

Such calls are those in which ranks wait for each other: torch.distributed waits for up to 20 minutes.
"""

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from baton.core.exits import exit_at_once


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
