"""A rank above 0, as seen by rank 0's process: the process, the two connections to it, and its answers."""

import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue

from baton.core.errors import ConfigError
from baton.node.fault import Fault
from baton.node.ranks.messages import Up

# What a rank has sent is read after its end, and then its connection ends. A busy machine may read it this late, but if
# nothing comes for `_SILENT_S`, a process that the rank left keeps the connection open.
_READ_S, _SILENT_S = 10.0, 1.0


@dataclass(frozen=True)
class Worker:
    """A rank above 0.

    Attributes:
        popen: None if the rank runs on another host.
        calls, steps: this process's ends of the two connections to the rank. `steps` also carries `Setup` to the rank,
            and `Up` and a `Fault` back.
        answers: the rank's answer to its `Setup`, one when its runner is prepared, then None when the rank has ended.
        drained: set once the rank has ended and everything that it sent has been read.
    """

    rank: int
    popen: subprocess.Popen[bytes] | None
    calls: socket.socket
    steps: Connection
    answers: "SimpleQueue[Up | None]" = field(default_factory=SimpleQueue)
    drained: threading.Event = field(default_factory=threading.Event)

    @property
    def place(self) -> str:
        return f"rank {self.rank} of another host" if self.popen is None else f"rank {self.rank} (pid {self.popen.pid})"

    def receive_all(self, on_fault: Callable[[Fault], None]) -> None:
        """Receives the rank's messages until the rank is gone. Runs on a thread of its own."""
        with suppress(EOFError, OSError):
            while True:
                message: Up | Fault = self.steps.recv()
                if isinstance(message, Up):
                    self.answers.put(message)
                else:
                    # The ranks of one host have one model and one set of settings.
                    ours = message.setting is not None and self.popen is not None
                    on_fault(message if ours else message.within(self.place))
        self.answers.put(None)
        self.drained.set()

    def wait_drained(self) -> None:
        """Waits, once the rank has ended, until everything that it sent has been read."""
        deadline_s = time.monotonic() + _READ_S
        while not self.drained.wait(_SILENT_S) and self._has_input() and time.monotonic() < deadline_s:
            pass

    def _has_input(self) -> bool:
        steps = select.poll()
        steps.register(self.steps.fileno(), select.POLLIN)
        return bool(steps.poll(0))

    def close(self) -> None:
        """Lets the rank end. `receive_all` continues until then."""
        with socket.socket(fileno=os.dup(self.steps.fileno())) as steps, suppress(OSError):
            steps.shutdown(socket.SHUT_WR)
        self.calls.close()


def wait_for_ranks(workers: Iterable[Worker], *, within_s: float | None) -> None:
    """Returns when every rank has sent its next `Up`.

    Args:
        within_s: time limit; None: none.

    Raises:
        EOFError: a rank has ended.
        ConfigError: a rank did not connect in time.
    """
    deadline_s = None if within_s is None else time.monotonic() + within_s
    for worker in workers:
        try:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            answer = worker.answers.get(timeout=left_s)
        except Empty:
            raise ConfigError(
                f"{worker.place} did not connect within {within_s:g} s",
                field="num_hosts",
                cure="start all hosts of the node; see their logs",
            ) from None
        if answer is None:
            raise EOFError(f"{worker.place} has ended")
