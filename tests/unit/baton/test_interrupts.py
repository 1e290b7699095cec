"""Ctrl-C ends a program that still imports its packages."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli.processes import module_of
from baton.core.interrupts import INTERRUPTED, TERMINATED, plain_interrupts

# Stands for a package that is being imported, and that takes a signal for an error of its own.
SIGNALLED_IMPORT = """
import os, signal
try:
    os.kill(os.getpid(), signal.{signal})
    while True:
        signal.pause()
except BaseException as error:
    raise ImportError("broken") from error
"""


PROGRAMS = pytest.mark.parametrize(
    ("program", "package"),
    [("gateway", "uvloop"), ("prefill_node", "torch"), ("decode_node", "torch"), ("baton", "typer")],
)


def signalled_during_imports(program: str, package: str, name: str, tmp_path: Path) -> tuple[int, str]:
    """Starts a program that gets the signal while it imports the package; returns its exit code and stderr."""
    (tmp_path / f"{package}.py").write_text(SIGNALLED_IMPORT.format(signal=name))
    flags = ["--decode=127.0.0.1:1"] if program == "gateway" else []
    done = subprocess.run(
        [sys.executable, "-m", module_of(program), *flags],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        check=False,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr


@PROGRAMS
def test_an_interrupt_during_imports_is_one_line(program: str, package: str, tmp_path: Path) -> None:
    ended = signalled_during_imports(program, package, "SIGINT", tmp_path)
    assert ended == (INTERRUPTED, f"{program}: interrupted\n")


@PROGRAMS
def test_the_first_process_of_a_container_ends_at_sigterm_during_imports(
    program: str, package: str, tmp_path: Path
) -> None:
    # The kernel gives such a process only the signals for which it has a handler, and that one exits with a code.
    assert signalled_during_imports(program, package, "SIGTERM", tmp_path) == (TERMINATED, "")


def test_a_program_that_runs_handles_its_interrupts_itself() -> None:
    with plain_interrupts("test"):
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with plain_interrupts("test"):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_a_program_that_was_started_without_its_streams_writes_nowhere(closed: tuple[int, ...]) -> None:
    program = (
        f"import os, sys\nfor number in {closed}: os.close(number)\nsys.stdout = sys.stderr = None\n"
        "from baton.core.interrupts import plain_interrupts\n"
        "with plain_interrupts('x'): pass\n"
        f"assert all(os.fstat(number) for number in range(3))\n"
        "sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 7
