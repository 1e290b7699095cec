"""The ranks of a node above 0: starts their processes, watches them, and ends them with the node.

A rank that ends by itself ends the node, because its part of the model is gone. Ranks of other hosts are started there
(`baton.node.ranks.host`) and reach this process through its gate (`baton.node.ranks.gate`). A fault ends the node
without its main thread, which may wait for a rank: children are killed, the reason is logged, the process exits.
"""

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from baton.core.errors import Draining
from baton.core.exits import WRITE_S, exit_at_once, exit_within
from baton.core.supervisor import Supervisor
from baton.node.fault import Fault
from baton.node.ranks.child import child_command
from baton.node.ranks.host import how_ended, worker_command
from baton.node.ranks.hosts import JOIN_S, Hosts
from baton.node.ranks.join import serve_store
from baton.node.ranks.messages import CHANNELS, Failed, GateReport, GateSetup, Joined, Meeting, RankLost, Setup
from baton.node.ranks.stopped import StoppedFor
from baton.node.ranks.worker_handle import Worker, wait_for_ranks
from baton.security.roles import Role
from baton.settings.environment import child_environment
from baton.settings.node_config import NodeSettings

log = logging.getLogger("baton")

_END_TIMEOUT_S = 5.0
# A rank's connections break up to this long before the parent sees that its process has ended.
_EXPLAINED_S = 3.0
# Time to wait for killed processes, so that their memory is free when this one ends; one in a driver's call may stay.
_REAP_S = 1.0
# Requests get this long to fail once the node cannot go on: `baton.node.process` takes up to 2 s for it.
_FAIL_S = 3.0


class RankGroup:
    """The workers of this process. Made by `start_ranks`."""

    def __init__(self, settings: NodeSettings, program: str, role: Role, supervisor: Supervisor) -> None:
        self.size = settings.tensor_parallel_size
        self.workers: tuple[Worker, ...] = ()
        self._settings, self._program, self._role, self._supervisor = settings, program, role, supervisor
        self._hosts = Hosts.of(settings)
        self._lock, self._ended = threading.Lock(), threading.Lock()
        self._failed = threading.Event()
        self._fault: Fault | None = None
        self._on_failure: Callable[[str], None] | None = None
        self._ending = self._loaded = False
        self._gate: subprocess.Popen[bytes] | None = None
        # A file in memory, without a name, so that nothing of it is left, however the processes end.
        self._store_descriptor = os.memfd_create("baton-ranks")
        self._meeting = Meeting(Path(f"/proc/{os.getpid()}/fd/{self._store_descriptor}"))

    def start(self) -> None:
        """Starts the ranks of this host, and the gate for ranks of other hosts."""
        for rank in self._hosts.local[1:]:
            worker = self._start(rank, self._settings)
            self.workers = (*self.workers, worker)
            self._in_thread(f"rank-{rank}", self._watch, worker)
        if self._hosts.leader is not None:
            self._store, self._meeting = serve_store(self._hosts.leader.host.strip("[]"))
            self.workers = (*self.workers, *self._open_gate())
        for worker in self.workers:
            self._in_thread(f"from-rank-{worker.rank}", worker.receive_all, self._fail)
            with suppress(OSError):  # the rank has ended, which `_watch` notices
                worker.steps.send(Setup(self._settings, self._program, worker.rank, self._meeting))
        if self._hosts.local[1:]:
            self._in_thread("stopped-ranks", self._watch_stopped)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Sets the callback for the first failure, called on any thread. A failure then no longer ends the process."""
        with self._lock:
            self._on_failure = callback
            fault = self._fault
        if fault is not None:
            callback(fault.line)

    def fail(self, reason: str) -> None:
        """Ends the node for this reason. Only the first call counts; any thread may call it."""
        self._fail(Fault(reason))

    def fail_unless_explained(self, reason: str) -> None:
        """Ends the node as `fail` does. If a rank's end is noticed shortly after, that is the reason instead."""
        if not self._failed.wait(_EXPLAINED_S):
            self.fail(reason)

    def abandon(self, reason: str) -> NoReturn:
        """Ends this process and all ranks at once, because threads may wait for a GPU for ever. An earlier failure, if
        there is one, is logged as the reason."""
        self._abandon(self._fault or Fault(reason))

    def end_with(self, error: BaseException) -> NoReturn:
        """Ends this process and all ranks at once, with an error as the reason."""
        fault = Fault.of(error)
        # Connections, torch and calls raise such errors when a rank is gone.
        if self.size > 1 and fault.lines and isinstance(error, EOFError | OSError | RuntimeError | Draining):
            self._failed.wait(_EXPLAINED_S)
        self._abandon(self._fault or fault)

    @contextmanager
    def ending_at_errors(self) -> Iterator[None]:
        """Ends the node if the block raises, before the enclosing contexts close, because these may wait for ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.end_with(error)

    def meeting_place(self) -> Meeting:
        """Waits until all ranks are about to meet, and returns the place. Unlike torch's own wait, a signal ends this.

        Raises:
            EOFError: a rank has ended.
            ConfigError: a rank did not connect in time.
        """
        wait_for_ranks(self.workers, within_s=JOIN_S)
        return self._meeting

    def wait_prepared(self) -> None:
        """Waits until the runners of all ranks are prepared, however long they compile and capture.

        Raises:
            EOFError: a rank has ended.
        """
        wait_for_ranks(self.workers, within_s=None)

    def loaded(self) -> None:
        """Notes that all ranks have found each other and loaded their parts of the model."""
        self._loaded = True

    def end(self) -> None:
        """Lets the workers end. Kills workers that do not, or that are still loading."""
        self._end_once()
        for worker in self.workers:
            worker.close()
        self._reap(_END_TIMEOUT_S if self._loaded else 0.0)
        self._kill()
        self._reap(_REAP_S)
        os.close(self._store_descriptor)

    # ---- faults

    def _fail(self, fault: Fault) -> None:
        with self._lock:
            if self._ending or self._fault is not None:
                return
            self._fault = fault
            self._failed.set()
            callback = self._on_failure
        if callback is None:
            self._abandon(fault)
        timer = threading.Timer(_FAIL_S, self._give_up)
        timer.daemon = True
        timer.start()
        callback(fault.line)

    def _give_up(self) -> None:
        """Ends the node, because the event loop, which should have done so, is stuck."""
        assert self._fault is not None
        if not self._ending:
            self._abandon(self._fault)

    def _abandon(self, fault: Fault) -> NoReturn:
        self._end_once()
        exit_within(_REAP_S + WRITE_S)
        self._kill()  # first, so that no rank reports errors that another rank's end causes
        fault.log(self._program, self._supervisor)
        self._reap(_REAP_S)
        exit_at_once(fault.exit_code)

    def _end_once(self) -> None:
        """Returns only to the first thread, which ends the group. Other threads wait here for the process's end."""
        self._ending = True
        if not self._ended.acquire(blocking=False):
            threading.Event().wait()

    # ---- processes

    def _start(self, rank: int, settings: NodeSettings) -> Worker:
        (calls, their_calls), (our_steps, their_steps) = socket.socketpair(), socket.socketpair()
        with their_calls, their_steps:
            descriptors = their_calls.fileno(), their_steps.fileno()
            popen = _spawn(worker_command(*descriptors, model=settings.model), descriptors)
        return Worker(rank, popen, calls, Connection(our_steps.detach()))

    def _open_gate(self) -> list[Worker]:
        """Starts the gate. Returns the ranks of other hosts, which may not have come yet."""
        pairs = {(rank, name): socket.socketpair() for rank in self._hosts.remote for name in CHANNELS}
        control, their_control = socket.socketpair()
        theirs = {place: end.fileno() for place, (_, end) in pairs.items()}
        descriptors = (their_control.fileno(), *theirs.values())
        self._gate = _spawn(child_command("baton.node.ranks.gate", their_control.fileno()), descriptors)
        for end in (their_control, *(end for _, end in pairs.values())):
            end.close()
        reports = Connection(control.detach())
        self._in_thread("gate", self._watch_gate, reports)
        with suppress(OSError):  # the gate has ended, which `_watch_gate` notices
            reports.send(GateSetup(self._settings, self._program, self._role, theirs))
        where = self._settings.leader_address
        log.info("waiting for the ranks of %d other host(s) at %s", self._hosts.count - 1, where)
        return [
            Worker(rank, None, pairs[rank, "calls"][0], Connection(pairs[rank, "steps"][0].detach()))
            for rank in self._hosts.remote
        ]

    def _in_thread(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name=name, daemon=True).start()

    def _watch(self, worker: Worker) -> None:
        assert worker.popen is not None
        code = worker.popen.wait()
        worker.wait_drained()  # a fault that the rank sent is the better reason
        self.fail(f"{worker.place} {how_ended(code)}: this node ends")

    def _watch_stopped(self) -> None:
        """Ends the node if a rank is stopped before it serves: the other ranks would wait for it for ever."""
        popens = {worker.popen.pid: worker for worker in self.workers if worker.popen is not None}
        stopped = StoppedFor(popens)
        while self._on_failure is None and not self._ending:
            if (pid := stopped.first()) is not None:
                self.fail(f"{popens[pid].place} is stopped by a signal (SIGSTOP) before it serves: this node ends")
            time.sleep(stopped.INTERVAL_S)

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
                case RankLost(rank, host, why):
                    self._worker(rank).drained.wait(_EXPLAINED_S)
                    self.fail(f"rank {rank} on host {host} is gone ({why}): this node ends")
                case Failed(error):
                    self._fail(Fault.of(error))

    def _worker(self, rank: int) -> Worker:
        return next(worker for worker in self.workers if worker.rank == rank)

    def _children(self) -> list[subprocess.Popen[bytes]]:
        popens = [worker.popen for worker in self.workers] + [self._gate]
        return [popen for popen in popens if popen is not None]

    def _kill(self) -> None:
        for child in self._children():
            child.kill()

    def _reap(self, within_s: float) -> None:
        """Waits for the end of the children."""
        deadline_s = time.monotonic() + within_s
        for child in self._children():
            try:
                child.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.debug("process %d of this node has not ended in time", child.pid)


def _spawn(command: list[str], descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, env=child_environment())


@contextmanager
def start_ranks(settings: NodeSettings, program: str, role: Role, supervisor: Supervisor) -> Iterator[RankGroup]:
    """Starts this host's ranks above 0 as child processes, and the gate for ranks of other hosts.

    The ranks load their parts of the model while the caller loads its own. All of them, on other hosts too, end with
    this context, and with this process, however it ends. An error of the context ends this process.
    """
    group = RankGroup(settings, program, role, supervisor)
    try:
        group.start()
        yield group
    except BaseException as error:  # noqa: BLE001
        group.end_with(error)
    group.end()
