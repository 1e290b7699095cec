"""The ranks above 0 of a node: processes that are started with the node, watched by it, and ended with it.

A rank that ends by itself takes the node with it, because its part of the model is gone. Those of other hosts are
started there (`node.ranks.host`) and reach this process through its gate (`node.ranks.gate`).
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from baton.config import NodeSettings
from baton.environment import child_environment
from baton.errors import ConfigError, Draining
from baton.security.roles import Role
from node.ranks.host import how_ended, worker_command
from node.ranks.hosts import JOIN_S, Hosts
from node.ranks.join import serve_store
from node.ranks.messages import CHANNELS, Failed, GateReport, GateSetup, Joined, Lost, Meeting, Setup

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
        popen: None: it runs on another host.
        calls, steps: this process's ends of the two connections to it. `steps` also carries `Setup` and `Up`.
    """

    rank: int
    popen: subprocess.Popen[bytes] | None
    calls: socket.socket
    steps: Connection


class RankGroup:
    """The workers of this process. Made by `start_ranks`."""

    def __init__(self, settings: NodeSettings, program: str, role: Role) -> None:
        self.size = settings.tensor_parallel_size
        self._hosts = Hosts.of(settings)
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._failure: str | None = None
        self._exit_code = 1
        self._on_failure: Callable[[str], None] | None = None
        self._ending = self._loaded = False
        self._gate: subprocess.Popen[bytes] | None = None
        # A file without a name in any folder: nothing is left of it, however the processes end.
        self._store_descriptor = os.memfd_create("baton-ranks")
        self._meeting = Meeting(Path(f"/proc/{os.getpid()}/fd/{self._store_descriptor}"))
        remote: list[Worker] = []
        if self._hosts.leader is not None:
            self._store, self._meeting = serve_store(self._hosts.leader.host.strip("[]"))
            remote = self._open_gate(settings, program, role)
        self.workers = (*(self._start(rank, settings) for rank in self._hosts.local[1:]), *remote)
        for worker in self.workers:
            worker.steps.send(Setup(settings, program, worker.rank, self._meeting))
            if worker.popen is not None:
                name = f"rank-{worker.rank}"
                threading.Thread(target=self._watch, args=(worker.rank, worker.popen), name=name, daemon=True).start()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Sets who gets the first failure, on any thread; from now on it no longer ends the process."""
        with self._lock:
            self._on_failure = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def fail(self, reason: str, *, exit_code: int = 1) -> None:
        """Ends the node, which cannot go on, for this reason. Only the first call counts; any thread may call it."""
        with self._lock:
            if self._ending or self._failure is not None:
                return
            self._failure, self._exit_code = reason, exit_code
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
        os._exit(self._exit_code)

    def meeting_place(self) -> Meeting:
        """Where the ranks find each other. Returns when all of them are about to: unlike torch's own wait, this one
        ends with a signal.

        Raises:
            EOFError: a rank has ended.
            ConfigError: one does not come.
        """
        wait_for_ranks(self.workers, within_s=JOIN_S)
        return self._meeting

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
        for child in self._children():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.debug("process %d of this node did not end: killed", child.pid)
        self._kill()
        for child in self._children():
            child.wait()
        os.close(self._store_descriptor)

    def _start(self, rank: int, settings: NodeSettings) -> Worker:
        (calls, their_calls), (our_steps, their_steps) = socket.socketpair(), socket.socketpair()
        descriptors = their_calls.fileno(), their_steps.fileno()
        popen = subprocess.Popen(
            worker_command(*descriptors, model=settings.model),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=child_environment(),
        )
        their_calls.close()
        their_steps.close()
        return Worker(rank, popen, calls, Connection(our_steps.detach()))

    def _open_gate(self, settings: NodeSettings, program: str, role: Role) -> list[Worker]:
        """The ranks of other hosts, which may not have come yet."""
        pairs = {(rank, name): socket.socketpair() for rank in self._hosts.remote for name in CHANNELS}
        control, their_control = socket.socketpair()
        theirs = {place: end.fileno() for place, (_, end) in pairs.items()}
        self._gate = subprocess.Popen(
            [sys.executable, "-P", "-m", "node.ranks.gate", str(their_control.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(their_control.fileno(), *theirs.values()),
            env=child_environment(),
        )
        for end in (their_control, *(end for _, end in pairs.values())):
            end.close()
        reports = Connection(control.detach())
        reports.send(GateSetup(settings, program, role, theirs, os.getpid()))
        threading.Thread(target=self._watch_gate, args=(reports,), name="gate", daemon=True).start()
        log.info("waiting for the ranks of %d other host(s) at %s", self._hosts.count - 1, settings.leader_address)
        return [
            Worker(rank, None, pairs[rank, "calls"][0], Connection(pairs[rank, "steps"][0].detach()))
            for rank in self._hosts.remote
        ]

    def _watch(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        code = popen.wait()
        self.fail(f"rank {rank} (pid {popen.pid}) {how_ended(code)}: this node ends")

    def _watch_gate(self, reports: Connection) -> None:
        while True:
            try:
                report: GateReport = reports.recv()
            except (EOFError, OSError):
                self.fail("the process that carries the ranks of other hosts has ended: this node ends")
                return
            match report:
                case Joined(rank, host):
                    log.info("rank %d joined from %s", rank, host)
                case Lost(rank, host, why):
                    self.fail(f"rank {rank} on host {host} is gone ({why}): this node ends")
                case Failed(error):
                    self.fail(str(error), exit_code=2)

    def _children(self) -> list[subprocess.Popen[bytes]]:
        popens = [worker.popen for worker in self.workers] + [self._gate]
        return [popen for popen in popens if popen is not None]

    def _kill(self) -> None:
        self._ending = True
        for child in self._children():
            child.kill()


def wait_for_ranks(workers: Iterable[Worker], *, within_s: float) -> None:
    """Returns when every rank has answered its `Setup`.

    Raises:
        EOFError: a rank has ended.
        ConfigError: one does not come in time.
    """
    deadline_s = time.monotonic() + within_s
    for worker in workers:
        if not worker.steps.poll(max(0.0, deadline_s - time.monotonic())):
            where = "another host" if worker.popen is None else f"process {worker.popen.pid}"
            raise ConfigError(
                f"rank {worker.rank} of {where} has not come within {within_s:g} s",
                field="num_hosts",
                cure="start all hosts of the node; see their logs",
            )
        try:
            worker.steps.recv()
        except ConnectionError:
            raise EOFError(f"rank {worker.rank} has ended") from None


@contextmanager
def start_ranks(settings: NodeSettings, program: str, role: Role) -> Iterator[RankGroup]:
    """Starts the ranks above 0 as child processes; a node of one rank has none. They load their parts of the model
    while the caller loads its own. They end with this context, and with this process, however it ends; those of other
    hosts too, which come by themselves."""
    group = RankGroup(settings, program, role)
    try:
        yield group
    except (EOFError, RuntimeError, Draining):  # raised by connections, torch and calls when a rank is gone
        if group.size > 1 and (failure := group.failure()):
            group.abandon(failure)
        raise
    finally:
        group.end()
