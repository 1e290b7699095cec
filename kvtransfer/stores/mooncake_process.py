"""Runs the process that calls Mooncake Store, bounds each call, and stops asking for some seconds after a failure.

A call that fails or takes too long ends the process, so that nothing of it goes on. A thread replaces the process once
the store's master accepts connections again; until then there are no lanes.
"""

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Event, Thread

from baton.settings.environment import bare_environment
from kvtransfer.stores.mooncake_child import MESSAGE_BYTES_MAX, READY, UNUSABLE

log = logging.getLogger("baton")

# Codes of Mooncake: the master is not there, or does not answer.
_LOST_CODES = frozenset({-900, -901})
_SETUP_S = 30.0


class StoreLane:
    """One call at a time to the process, and the memory by which it takes and gives an entry.

    Attributes:
        memory: shared with the process.
        busy: a caller has it, and closes it if the process has ended. Another thread must not: a new file could get the
            descriptor's number while the caller reads.
    """

    def __init__(self, end: socket.socket, memory: memoryview, timeout_s: float) -> None:
        self._end = end
        self._timeout_s = timeout_s
        self.memory = memory
        self.busy = False

    def call(self, name: str, keys: Sequence[str], timeout_s: float | None = None) -> list[int]:
        """Mooncake's code for each key.

        Raises:
            OSError: the master is lost, or there was no answer in time. The lane must not be used again.
        """
        self._end.settimeout(self._timeout_s if timeout_s is None else timeout_s)
        self._end.send(json.dumps([name, list(keys)]).encode())
        answer = self._end.recv(MESSAGE_BYTES_MAX)
        if not answer:
            raise ConnectionResetError("the process that calls Mooncake Store has ended")
        codes: list[int] = json.loads(answer)
        if not _LOST_CODES.isdisjoint(codes):
            raise ConnectionResetError("the master of Mooncake Store does not answer")
        return codes

    def close(self) -> None:
        self._end.close()


class MooncakeProcess:
    """The process, and its lanes. Used by several threads.

    Args:
        lane_bytes: size of the memory that calls of `get` and `put` use.
        timeout_s: how long a call may take, and how long a caller may wait for a lane.
        pause_s: time without calls after a failure.
    """

    def __init__(
        self, host: str, port: int, lane_bytes: int, *, lanes: int = 4, timeout_s: float = 2.0, pause_s: float = 5.0
    ) -> None:
        self._host, self._port = host, port
        self._num_lanes, self._lane_bytes = lanes, lane_bytes
        self._timeout_s, self._pause_s = timeout_s, pause_s
        self._memory_fd = os.memfd_create("mooncake")
        os.ftruncate(self._memory_fd, lanes * lane_bytes)
        self._memory = memoryview(mmap.mmap(self._memory_fd, 0))
        self._changed = Condition()  # guards the three below
        self._popen: subprocess.Popen[bytes] | None = None
        self._lanes: list[StoreLane] = []  # of the process that is ready
        self._idle: list[StoreLane] = []
        self._closed = Event()
        self.unusable = ""  # why the client can never run here
        # The process ends with this thread.
        self._supervisor = Thread(target=self._supervise, name="mooncake", daemon=True)
        self._supervisor.start()

    @property
    def pid(self) -> int | None:
        """Id of the process. Returns None if there is none now."""
        popen = self._popen
        return None if popen is None else popen.pid

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until there are lanes, or there can be none. Returns whether there are."""
        with self._changed:
            self._changed.wait_for(lambda: self._lanes or self.unusable, timeout_s)
            return bool(self._lanes)

    @contextmanager
    def lane(self) -> Iterator[StoreLane | None]:
        """A lane for some calls. None: there is none now, or all were busy for too long.

        An exception in the body, which may have left an answer unread, ends the process and with it the calls of all
        lanes, and goes on to the caller.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._idle or not self._lanes, self._timeout_s)
            lane = self._idle.pop() if self._idle and not self._closed.is_set() else None
            if lane is not None:
                lane.busy = True
        try:
            yield lane
        except BaseException as error:
            if lane is not None:
                self._end(lane, error)
            raise
        finally:
            if lane is not None:
                self._give_back(lane)

    def close(self) -> None:
        """Waits for the calls of others, each within its bound, and ends the process."""
        if self._closed.is_set():
            return
        self._closed.set()
        with self._changed:
            self._changed.wait_for(lambda: len(self._idle) == len(self._lanes), self._timeout_s)
            self._lose_lanes()
            if self._popen is not None:
                self._popen.kill()
        self._supervisor.join()
        os.close(self._memory_fd)  # its memory is freed with the last lane

    def _give_back(self, lane: StoreLane) -> None:
        with self._changed:
            lane.busy = False
            if lane in self._lanes:
                self._idle.append(lane)
                self._changed.notify_all()
            else:
                lane.close()

    def _end(self, lane: StoreLane, error: BaseException) -> None:
        with self._changed:
            if lane in self._lanes:
                log.warning(
                    "Mooncake Store at %s:%d: %s; not asked for %.0f s and until it answers",
                    *(self._host, self._port, str(error) or type(error).__name__, self._pause_s),
                )
                self._lose_lanes()
                assert self._popen is not None
                self._popen.kill()

    def _lose_lanes(self) -> None:
        self._lanes, self._idle = [], []
        self._changed.notify_all()

    def _supervise(self) -> None:
        while not self._closed.is_set() and not self.unusable:
            try:
                self._run()
            except OSError as error:
                if not self._closed.is_set():
                    log.warning("Mooncake Store at %s:%d: %s", self._host, self._port, error)
            self._closed.wait(self._pause_s)

    def _run(self) -> None:
        """Runs one process to its end."""
        size = self._lane_bytes
        (control, their_control), *pairs = (
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1 + self._num_lanes)
        )
        theirs = [their_control, *(end for _, end in pairs)]
        lanes = [
            StoreLane(end, self._memory[number * size : (number + 1) * size], self._timeout_s)
            for number, (end, _) in enumerate(pairs)
        ]
        try:
            popen = self._start([end.fileno() for end in theirs])
            for end in theirs:
                end.close()
            try:
                self._follow(control, lanes)
            finally:
                popen.kill()
                popen.wait()
        finally:
            for end in (control, *theirs):
                end.close()
            with self._changed:
                self._popen = None
                self._lose_lanes()
                for lane in lanes:
                    if not lane.busy:
                        lane.close()

    def _start(self, fds: list[int]) -> "subprocess.Popen[bytes]":
        control_fd, *lane_fds = fds
        arguments = [os.getpid(), control_fd, self._memory_fd, self._lane_bytes, self._host, self._port, *lane_fds]
        with self._changed:
            if self._closed.is_set():
                raise ConnectionAbortedError("the store is closed")
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvtransfer.stores.mooncake_child", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the client logs every start and every call that fails
                pass_fds=(*fds, self._memory_fd),
                env=bare_environment(),
            )
            return self._popen

    def _follow(self, control: socket.socket, lanes: list[StoreLane]) -> None:
        """Offers the lanes while the process is ready; returns when it has ended or can never be ready."""
        reached = control.recv(MESSAGE_BYTES_MAX)  # comes as soon as the master accepts connections
        if reached.startswith(UNUSABLE):
            with self._changed:
                self.unusable = reached.removeprefix(UNUSABLE).decode(errors="replace")
                self._changed.notify_all()
            return
        if not reached:
            raise ConnectionRefusedError("the client's process ended at its start")
        control.settimeout(_SETUP_S)
        try:
            ready = control.recv(MESSAGE_BYTES_MAX) == READY
        except TimeoutError:
            ready = False
        if not ready:
            raise ConnectionRefusedError("the client does not start; is this the port of a mooncake_master?")
        control.settimeout(None)
        with self._changed:
            self._lanes, self._idle = lanes, list(lanes)
            self._changed.notify_all()
        log.info("Mooncake Store at %s:%d is connected", self._host, self._port)
        control.recv(MESSAGE_BYTES_MAX)  # returns at its end
