"""Programs of ours in processes forked from one that has imported them: importing torch takes each process seconds.

The fork server of `multiprocessing` starts with the first program, one for each pytest process. It has imported the
modules of `PRELOADED` and nothing else: no thread, no device (tests/test_architecture.py holds I7). UCX is loaded, and
not started.
"""

import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from pydantic import TypeAdapter

from baton.cli.processes import module_of
from baton.core.setting_names import flag
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.internal import is_internal, set_internal_defaults
from baton.settings.node_config import DecodeSettings, PrefillSettings

PRELOADED = (
    "baton.cli",
    "decode_node.service",
    "baton.gateway.http.server",
    "baton.gateway.grpc.services",
    "baton.node.process",
    "prefill_node.service",
    "tests.loads_ucx",
)
BATON = "baton"
ROLES = (PrefillSettings, DecodeSettings, GatewaySettings, PickerSettings)
SHOW_STACKS = signal.SIGUSR1  # to stderr, of all threads
_OUTPUTS = ("stdout", "stderr")


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
    """Call this before any other use of the fork server, which imports `PRELOADED` when it starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def launch_warm(
    program: str,
    arguments: Sequence[str],
    *,
    prepare: Callable[[], None] | None = None,
    variables: Mapping[str, str] | None = None,
    outputs: Path | None = None,
    folder: Path | None = None,
) -> Forked:
    """Runs `python -m program`, or the command `baton`, in a forked process, in a session of its own.

    Args:
        arguments: flags of a role may also give values that no user sets (`baton.settings.internal`).
        prepare: called in the process before the program starts.
        variables: added to this process's environment.
        outputs: an existing directory for the files `stdout` and `stderr`.
        folder: the working directory.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    # A daemon, so that a process that a broken test does not end ends with the tests.
    process = fork_server().Process(
        target=_run,
        args=(program, list(arguments), environment, prepare, outputs, folder),
        daemon=True,
    )
    process.start()
    return Forked(process)


def run_warm(
    program: str,
    *arguments: str,
    prepare: Callable[[], None] | None = None,
    folder: Path | None = None,
    timeout_s: float = 300.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` of `python -m program` with its output captured.

    Raises:
        TimeoutExpired: it did not end in time, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="baton-output-") as directory:
        outputs = Path(directory)
        process = launch_warm(program, arguments, prepare=prepare, variables=variables, outputs=outputs, folder=folder)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        out, err = ((outputs / name).read_text() for name in _OUTPUTS)
    return subprocess.CompletedProcess([program, *arguments], code, out, err)


def _run(
    program: str,
    arguments: list[str],
    environment: dict[str, str],
    prepare: Callable[[], None] | None,
    outputs: Path | None,
    folder: Path | None,
) -> None:
    # What was imported is never garbage. A collection would look at all of it, and copy its memory: of the 0.7 s of CPU
    # that a node takes to start, 0.4.
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    if outputs is not None:
        for descriptor, name in enumerate(_OUTPUTS, start=1):
            file = os.open(outputs / name, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, descriptor)
            os.close(file)
    faulthandler.register(SHOW_STACKS, all_threads=True)
    if prepare is not None:
        prepare()
    sys.argv = [program, *without_internal(arguments)]
    if program == BATON:
        from baton.cli import main

        main()
    runpy.run_module(module_of(program), run_name="__main__", alter_sys=True)


def without_internal(arguments: Sequence[str]) -> list[str]:
    """The arguments without the values that no flag sets; those become the defaults of this process's settings."""
    known = {flag(name): (name, info) for cls in ROLES for name, info in cls.model_fields.items() if is_internal(info)}
    kept: list[str] = []
    values: dict[str, object] = {}
    words = iter(arguments)
    for word in words:
        if word in known and word != "--supervisor":
            name, info = known[word]
            assert info.annotation is not None
            values[name] = TypeAdapter(info.annotation).validate_python(next(words))
        else:
            kept.append(word)
    if values:
        set_internal_defaults(values, *ROLES)
    return kept
