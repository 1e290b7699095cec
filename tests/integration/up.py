"""Starts and stops `baton up` as users do."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from tests.integration.cluster import DEADLINE_S

BATON = [sys.executable, "-c", "from baton.cli import main; main()"]


@dataclass(frozen=True)
class Up:
    """A running `baton up`, and the line that it printed when ready."""

    popen: subprocess.Popen[str]
    line: dict[str, object]

    @property
    def gateway(self) -> str:
        return str(self.line["gateway"])

    @property
    def pids(self) -> list[int]:
        pids = self.line["pids"]
        assert isinstance(pids, dict)
        return [pids["gateway"], *pids["prefill"], *pids["decode"]]


def start_up(*arguments: str, **variables: str) -> Up:
    """Returns once the cluster serves, on free ports.

    Args:
        variables: added to this process's environment.
    """
    popen = subprocess.Popen(
        [*BATON, "up", "--port", "0", "--http-port", "0", *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert popen.stdout is not None
    line = popen.stdout.readline()
    assert line, f"baton up ended with exit code {popen.wait(DEADLINE_S)} before it was ready"
    return Up(popen, json.loads(line))


def interrupt(up: Up) -> int:
    """Sends what Ctrl-C sends; returns the exit code."""
    os.kill(up.popen.pid, signal.SIGINT)
    up.popen.communicate(timeout=DEADLINE_S)
    return up.popen.returncode
