"""Starts the processes of a local cluster, receives their reports until they are ready, and ends them."""

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from baton.core.errors import ConfigError
from baton.settings.environment import child_environment

# A GPU node compiles kernels, profiles and captures graphs before it is ready.
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 40.0
_REPORT_BYTES_MAX = 1 << 16


class Running(Protocol):
    """The part of `subprocess.Popen` that this module uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def module_of(program: str) -> str:
    """Returns the module of a program: `baton.gateway` for `gateway`, else the program's own name."""
    return f"baton.{program}" if program == "gateway" else program


def launch(program: str, arguments: Sequence[str]) -> Running:
    """Starts a program in its own session, so that Ctrl-C reaches only this process, which drains the others."""
    return subprocess.Popen(
        [sys.executable, "-m", module_of(program), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=child_environment(OMP_NUM_THREADS="1"),  # several processes share few cores
        start_new_session=True,
    )


@dataclass(eq=False)
class Process:
    """A child process and what it last reported.

    Attributes:
        name: for display.
        address: where the process serves; set once its port is bound, before it is ready.
        http: where a gateway serves HTTP; None if it does not.
        metrics: where its metrics are scraped; None if they have no port.
        stage: what the process does, such as "loading"; "ready" once it serves.
        error: why the process cannot start or continue, if it reported that.
        done, total: progress of the stage in bytes; both 0 if it is not measured.
    """

    program: str
    name: str
    popen: Running
    address: str = ""
    http: str | None = None
    metrics: str | None = None
    stage: str = "starting"
    error: str = ""
    done: int = 0
    total: int = 0

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def how(self) -> str:
        """How the process ended, for a message."""
        code = self.popen.poll()
        if code is None or code >= 0:
            return f"with exit code {code}"
        return f"by signal {-code} ({signal.strsignal(-code) or 'unknown'})"

    @property
    def ready(self) -> bool:
        return self.stage == "ready"


def check_running(processes: Iterable[Process]) -> None:
    """Checks that all processes still run.

    Raises:
        ConfigError: a process has ended.
    """
    for process in processes:
        if process.popen.poll() is not None:
            raise _why_ended(process)


class _Reports:
    """Receives reports of child processes. Each has its own connection, so the kernel knows the sender's pid."""

    def __init__(self) -> None:
        self.name = f"baton-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def receive(self, timeout_s: float) -> list[tuple[int, dict[str, object]]] | None:
        """Waits for reports. Returns at most one per connection, with the pid of its sender.

        Returns None if neither a report nor a connection arrived in time.
        """
        found: list[tuple[int, dict[str, object]]] = []
        events = self._selector.select(timeout_s)
        for key, _ in events:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                child, _ = self._listener.accept()
                self._selector.register(child, selectors.EVENT_READ)
            elif (report := self._read(connection)) is not None:
                found.append((_pid(connection), report))
        return found if events else None

    def _read(self, connection: socket.socket) -> dict[str, object] | None:
        try:
            message = connection.recv(_REPORT_BYTES_MAX)
        except OSError:
            message = b""
        if message:
            report = json.loads(message)
            assert isinstance(report, dict)
            return report
        self._selector.unregister(connection)
        connection.close()
        return None

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


def _pid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)  # pid, uid, gid
    return int.from_bytes(credentials[:4], sys.byteorder)


@dataclass
class Processes:
    """Child processes that end together in reverse order of their start, and also when this process dies.

    Attributes:
        report: prints a line about a process.
        launch: starts one program; tests pass a function that forks a warm process.
        on_change: called with all processes whenever one may have reported, and often while waiting.
    """

    report: Callable[[str], None]
    launch: Callable[[str, Sequence[str]], Running] = launch
    running: list[Process] = field(default_factory=list)
    on_change: Callable[[Sequence[Process]], None] | None = None
    _reports: _Reports = field(default_factory=_Reports)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._reports.close()

    def start(self, program: str, arguments: Sequence[str], *, name: str = "") -> Process:
        """Starts a program, and returns at once; `wait_ready` waits until it serves."""
        popen = self.launch(program, [*arguments, "--supervisor", self._reports.name])
        process = Process(program, name or program, popen)
        self.running.append(process)
        self._changed()
        return process

    def wait_bound(self, processes: Sequence[Process]) -> None:
        """Waits until every process has bound its port. It may not serve there yet.
        Raises:
            ConfigError: a process ended or took too long; its own message is on stderr.
        """
        self._wait(processes, lambda process: bool(process.address), "does not listen")

    def wait_ready(self, processes: Sequence[Process]) -> None:
        """Waits until every process serves.

        Raises:
            ConfigError: as `wait_bound`.
        """
        self._wait(processes, lambda process: process.ready, "is not ready")

    def take_reports(self) -> None:
        """Applies all reports that have arrived, without waiting."""
        while self._receive(0.0):
            pass

    def first_ended(self) -> Process | None:
        """Returns the first process that ended on its own, or None."""
        return next((process for process in self.running if process.popen.poll() is not None), None)

    def stop(self) -> None:
        """Drains and ends all processes, the last started first. Kills processes that do not end in time."""
        while self.running:
            program = self.running[-1].program
            group = [process for process in self.running if process.program == program]
            self._end(group)
            self.running = [process for process in self.running if process not in group]

    def _wait(self, processes: Sequence[Process], reached: Callable[[Process], bool], missing: str) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while waiting := [process for process in processes if not reached(process)]:
            for process in processes:
                if process.popen.poll() is not None:
                    self.take_reports()
                    raise _why_ended(process)
            if time.monotonic() > deadline:
                raise ConfigError(f"{waiting[0].name} {missing} after {_READY_TIMEOUT_S:.0f} s")
            self._receive(0.05)

    def _receive(self, timeout_s: float) -> bool:
        """Applies the reports that arrive in time. Returns whether more may follow."""
        by_pid = {process.pid: process for process in self.running}
        reports = self._reports.receive(timeout_s)
        for pid, report in reports or ():
            if (process := by_pid.get(pid)) is not None:
                _apply(process, report)
        self._changed()
        return reports is not None

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change(self.running)

    def _end(self, group: Sequence[Process]) -> None:
        for process in group:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in group:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.report(f"killed {process.name} (pid {process.pid}), which did not end in {_STOP_TIMEOUT_S:.0f} s")
                process.popen.kill()
                process.popen.wait()


def _why_ended(process: Process) -> ConfigError:
    """Returns the error that the process reported, or one that says how it ended."""
    if process.error:
        return ConfigError(process.error)
    return ConfigError(f"{process.name} ended {process.how}", cure="see its message above")


def _apply(process: Process, report: dict[str, object]) -> None:
    process.stage = str(report["stage"])
    process.done, process.total = int(str(report.get("done", 0))), int(str(report.get("total", 0)))
    process.error = str(report.get("error", process.error))
    process.address = str(report.get("address", process.address))
    if (http := report.get("http")) is not None:
        process.http = str(http)
    if (metrics := report.get("metrics")) is not None:
        process.metrics = str(metrics)
