"""The processes of a node's ranks above 0: started with the node, watched by it, ended with it.

A rank that ends by itself takes the node with it, because its part of the model is gone.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from baton.config import NodeSettings
from baton.environment import child_environment
from baton.errors import Draining
from node.ranks.messages import Setup

log = logging.getLogger("baton")

_END_TIMEOUT_S = 5.0
# A rank's connections break up to this long before the parent sees that its process has ended.
_EXPLAINED_S = 0.5
# While ranks load, all of them find the same fault: this process gets that long to log it itself.
_OWN_FAULT_S = 2.0


@dataclass(frozen=True)
class Worker:
    """A rank above 0.

    Attributes:
        calls, steps: this process's ends of the two connections to it. `steps` also carries `Setup` and `Up`.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    calls: socket.socket
    steps: Connection


class RankGroup:
    """The workers of this process. Made by `start_ranks`."""

    def __init__(self, settings: NodeSettings, program: str) -> None:
        self.size = settings.tensor_parallel_size
        # A file without a name in any folder: nothing is left of it, however the processes end.
        self._store_descriptor = os.memfd_create("baton-ranks")
        self._store = Path(f"/proc/{os.getpid()}/fd/{self._store_descriptor}")
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._failure: str | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._ending = self._loaded = False
        self.workers = tuple(self._start(rank, settings, program) for rank in range(1, self.size))
        for worker in self.workers:
            threading.Thread(target=self._watch, args=(worker,), name=f"rank-{worker.rank}", daemon=True).start()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Sets who gets the first failure, on any thread; from now on it no longer ends the process."""
        with self._lock:
            self._on_failure = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def fail(self, reason: str) -> None:
        """Ends the node, which cannot go on, for this reason. Only the first call counts; any thread may call it."""
        with self._lock:
            if self._ending or self._failure is not None:
                return
            self._failure = reason
            self._failed.set()
            callback = self._on_failure
        if callback is not None:
            callback(reason)
            return
        time.sleep(_OWN_FAULT_S)
        if not self._ending:
            self.abandon(reason)

    def fail_unless_explained(self, reason: str) -> None:
        """As `fail`, unless a rank's end is noticed shortly after: then that is the reason."""
        if not self._failed.wait(_EXPLAINED_S):
            self.fail(reason)

    def failure(self) -> str | None:
        """Why the node cannot go on; waits a moment for the end of a rank to be noticed."""
        return self._failure if self._failed.wait(_EXPLAINED_S) else None

    def abandon(self, reason: str) -> None:
        """Logs the reason and ends this process and all ranks at once: threads may wait for a GPU forever."""
        log.error("%s", reason)
        self._kill()
        logging.shutdown()
        os._exit(1)

    def meeting_place(self) -> Path:
        """A file in which the ranks find each other. Returns when all of them are about to read it: unlike torch's own
        wait, this one ends with a signal.

        Raises:
            EOFError: a rank has ended.
        """
        for worker in self.workers:
            try:
                worker.steps.recv()
            except ConnectionError:
                raise EOFError(f"rank {worker.rank} has ended") from None
        return self._store

    def loaded(self) -> None:
        """All ranks have found each other and loaded their parts of the model."""
        self._loaded = True

    def end(self) -> None:
        """Lets the workers end; kills those that do not, and those that still load."""
        self._ending = True
        for worker in self.workers:
            worker.steps.close()
            worker.calls.close()
        deadline = time.monotonic() + (_END_TIMEOUT_S if self._loaded else 0.0)
        for worker in self.workers:
            try:
                worker.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.debug("rank %d did not end: killed", worker.rank)
        self._kill()
        for worker in self.workers:
            worker.popen.wait()
        os.close(self._store_descriptor)

    def _start(self, rank: int, settings: NodeSettings, program: str) -> Worker:
        (calls, their_calls), (our_steps, their_steps) = socket.socketpair(), socket.socketpair()
        descriptors = their_calls.fileno(), their_steps.fileno()
        popen = subprocess.Popen(
            # NOTE: -P: without it a `models.py` in the user's working directory shadows our package.
            [sys.executable, "-P", "-m", "node.ranks.worker", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=child_environment(),
        )
        their_calls.close()
        their_steps.close()
        steps = Connection(our_steps.detach())
        steps.send(Setup(settings, program, rank, self._store, leader=os.getpid()))
        return Worker(rank, popen, calls, steps)

    def _watch(self, worker: Worker) -> None:
        code = worker.popen.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.fail(f"rank {worker.rank} (pid {worker.popen.pid}) {how}: this node ends")

    def _kill(self) -> None:
        self._ending = True
        for worker in self.workers:
            worker.popen.kill()


@contextmanager
def start_ranks(settings: NodeSettings, program: str) -> Iterator[RankGroup]:
    """Starts the ranks above 0 as child processes; a node of one rank has none. They load their parts of the model
    while the caller loads its own. They end with this context, and with this process, however it ends."""
    group = RankGroup(settings, program)
    try:
        yield group
    except (EOFError, RuntimeError, Draining):  # raised by connections, torch and calls when a rank is gone
        if group.size > 1 and (failure := group.failure()):
            group.abandon(failure)
        raise
    finally:
        group.end()
