"""Starts the processes of a local cluster, waits until they serve, and ends them."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from baton.config import child_environment
from baton.errors import ConfigError

# A GPU node compiles kernels, profiles and captures graphs before it is ready.
_READY_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 40.0


class Running(Protocol):
    """The part of `subprocess.Popen` that this module uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def launch(program: str, arguments: Sequence[str]) -> Running:
    """Starts `python -m program` in its own session: Ctrl-C reaches only this process, which drains the others."""
    return subprocess.Popen(
        [sys.executable, "-m", program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env=child_environment(OMP_NUM_THREADS="1"),  # several processes share few cores
        start_new_session=True,
    )


@dataclass(eq=False)
class Process:
    """A child process and the address at which it serves."""

    program: str
    popen: Running
    ready_file: Path
    address: str = ""

    @property
    def pid(self) -> int:
        return self.popen.pid


@dataclass
class Processes:
    """Child processes that end together, in reverse order of their start.

    Attributes:
        launch: starts one program; tests give one that forks a warm process.
    """

    report: Callable[[str], None]
    launch: Callable[[str, Sequence[str]], Running] = launch
    running: list[Process] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] = field(
        default_factory=lambda: tempfile.TemporaryDirectory(prefix="baton-")
    )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, program: str, arguments: Sequence[str]) -> Process:
        """Starts a program. `wait_ready` knows when it serves."""
        ready_file = Path(self._folder.name) / f"{program}-{len(self.running)}.json"
        popen = self.launch(program, [*arguments, "--ready-file", str(ready_file)])
        process = Process(program, popen, ready_file)
        self.running.append(process)
        return process

    def wait_ready(self, processes: Sequence[Process]) -> None:
        """Waits until every process serves.

        Raises:
            ConfigError: a process ended or took too long; its own message is on stderr.
        """
        deadline = time.monotonic() + _READY_TIMEOUT_S
        for process in processes:
            while not process.ready_file.exists():
                code = process.popen.poll()
                if code is not None:
                    raise ConfigError(f"{process.program} ended with exit code {code}", cure="see its message above")
                if time.monotonic() > deadline:
                    raise ConfigError(f"{process.program} is not ready after {_READY_TIMEOUT_S:.0f} s")
                time.sleep(0.02)
            process.address = json.loads(process.ready_file.read_text())["address"]
            self.report(f"{process.program} serves on {process.address}")

    def first_ended(self) -> Process | None:
        """A process that ended on its own, if any."""
        return next((process for process in self.running if process.popen.poll() is not None), None)

    def stop(self) -> None:
        """Drains and ends all processes, the last started first. Kills those that do not end in time."""
        while self.running:
            program = self.running[-1].program
            group = [process for process in self.running if process.program == program]
            self._end(group)
            self.running = [process for process in self.running if process not in group]
        self._folder.cleanup()

    def _end(self, group: Sequence[Process]) -> None:
        for process in group:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in group:
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.report(f"{process.program} (pid {process.pid}) did not end: killed")
                process.popen.kill()
                process.popen.wait()
