"""The processes of a node's ranks above 0: started with it, watched by it, ended with it.

A rank that ends by itself takes the node with it: what it held of the model is gone. Knows nothing of steps and calls.
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.config import NodeSettings, child_environment
from baton.errors import Draining
from node.ranks.channel import Channel
from node.ranks.messages import Setup

log = logging.getLogger("baton")

_END_TIMEOUT_S = 5.0
# A rank's connections break before its end is seen.
_EXPLAINED_S = 0.5
# While ranks load, all of them find the same fault: this process's own word about it comes first, within that time.
_OWN_WORD_S = 2.0


@dataclass(frozen=True)
class Worker:
    """A rank above 0.

    Attributes:
        calls, steps: this process's ends of the two lines to it.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    calls: Channel
    steps: Channel


class RankGroup:
    """The workers of this process. Made by `start_ranks`."""

    def __init__(self, settings: NodeSettings, program: str) -> None:
        self.size = settings.tensor_parallel_size
        self._directory = None if self.size == 1 else Path(tempfile.mkdtemp(prefix="baton-ranks-"))
        self._store = (self._directory or Path()) / "ranks"
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._failure: str | None = None
        self._hear: Callable[[str], None] | None = None
        self._ending = self._loaded = False
        self.workers = tuple(self._start(rank, settings, program) for rank in range(1, self.size))
        for worker in self.workers:
            threading.Thread(target=self._watch, args=(worker,), name=f"rank-{worker.rank}", daemon=True).start()

    def listen(self, hear: Callable[[str], None]) -> None:
        """From now on the first failure is told, on any thread, and no longer ends the process."""
        with self._lock:
            self._hear = hear
            failure = self._failure
        if failure is not None:
            hear(failure)

    def fail(self, reason: str) -> None:
        """The node cannot go on; said once, on any thread."""
        with self._lock:
            if self._ending or self._failure is not None:
                return
            self._failure = reason
            self._failed.set()
            hear = self._hear
        if hear is not None:
            hear(reason)
            return
        time.sleep(_OWN_WORD_S)
        if not self._ending:
            self.abandon(reason)

    def trouble(self, reason: str) -> None:
        """Something went wrong that a rank's end may explain: then that is the reason."""
        if not self._failed.wait(_EXPLAINED_S):
            self.fail(reason)

    def gone(self) -> str | None:
        """Why the node cannot go on, if that is known soon."""
        return self._failure if self._failed.wait(_EXPLAINED_S) else None

    def abandon(self, reason: str) -> None:
        """Ends this process and all ranks at once, with that as its last word: threads may wait for a GPU for ever."""
        log.error("%s", reason)
        self._kill()
        self._remove_directory()
        logging.shutdown()
        os._exit(1)

    def meeting_place(self) -> Path:
        """A file in which the ranks find each other. Returns when all of them are on their way there: unlike torch's,
        this wait ends with a signal.

        Raises:
            EOFError: a rank has ended.
        """
        for worker in self.workers:
            worker.calls.receive()
        return self._store

    def loaded(self) -> None:
        """All ranks have found each other, and have their parts of the model."""
        self._loaded = True
        self._remove_directory()

    def end(self) -> None:
        """Lets the workers end, and kills those that do not, or that still load."""
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
        self._remove_directory()

    def _start(self, rank: int, settings: NodeSettings, program: str) -> Worker:
        lines = socket.socketpair(), socket.socketpair()
        theirs = [line[1] for line in lines]
        descriptors = [end.fileno() for end in theirs]
        popen = subprocess.Popen(
            [sys.executable, "-m", "node.ranks.worker", *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=child_environment(),
        )
        for end in theirs:
            end.close()
        calls, steps = (Channel(line[0]) for line in lines)
        calls.send(Setup(settings, program, rank, self._store, leader=os.getpid()))
        return Worker(rank, popen, calls, steps)

    def _watch(self, worker: Worker) -> None:
        code = worker.popen.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.fail(f"rank {worker.rank} (pid {worker.popen.pid}) {how}: this node ends")

    def _kill(self) -> None:
        self._ending = True
        for worker in self.workers:
            worker.popen.kill()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def start_ranks(settings: NodeSettings, program: str) -> Iterator[RankGroup]:
    """The ranks above 0 as child processes, which load their parts of the model while the caller loads its own; none
    for a node of one rank. They end when this does, and when this process does, however it ends."""
    group = RankGroup(settings, program)
    try:
        yield group
    except (EOFError, RuntimeError, Draining):  # what a channel, torch, and the calls to a rank say when it is gone
        if group.size > 1 and (failure := group.gone()):
            group.abandon(failure)
        raise
    finally:
        group.end()
