"""Programs of ours in processes forked from one that has imported them: importing torch takes each process seconds.

The fork server of `multiprocessing` starts with the first program, one for each pytest process. It has imported the
modules of `PRELOADED` and nothing else: no thread, no device, no UCX (tests/test_architecture.py holds I7).
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOADED = ("decode_node.service", "gateway.service", "node.process", "prefill_node.service")


class Forked:
    """A forked process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired as `Popen.wait` does."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_server() -> ForkServerContext:
    """To be asked for before any other use of the fork server, which imports `PRELOADED` when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def launch_warm(program: str, arguments: Sequence[str]) -> Forked:
    """Runs `python -m program` in a forked process, in a session of its own."""
    # A daemon: one that a broken test leaves behind ends with the tests.
    process = fork_server().Process(target=_run, args=(program, list(arguments), dict(os.environ)), daemon=True)
    process.start()
    return Forked(process)


def _run(program: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
