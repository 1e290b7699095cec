"""SIGTERM before a node serves: its end, also while the main thread is in a call that runs no Python.

Such calls are those in which ranks wait for each other: torch.distributed waits for up to 20 minutes.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Inside it, SIGTERM ends this process at once with exit code 0: nothing is served yet, and other ranks end with
    it. SIGTERM must have a Python handler, which then may not run. On the main thread only."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    thread = threading.Thread(target=_end_at_sigterm, args=(ours,), name="signals", daemon=True)
    thread.start()
    # NOTE: the C part of Python's handlers writes the signal's number there, whatever the main thread does.
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        thread.join()
        ours.close()


def end_at_once() -> None:
    logging.shutdown()
    os._exit(0)


def _end_at_sigterm(signals: socket.socket) -> None:
    while numbers := signals.recv(1):
        if numbers[0] == signal.SIGTERM:
            end_at_once()
