"""A thousand streams at once over HTTP: k6 reads each to its end, and the gateway keeps no state of them."""

import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.install import CLIENTS
from tests.integration.up import Up, interrupt, start_up

STREAMS = 1000
SCRIPT = Path(__file__).with_name("k6_streams.js")


@pytest.fixture
def cluster() -> Iterator[Up]:
    """Its nodes let all streams wait for room, which the default 256 of a small model on a CPU do not."""
    up = start_up("--port", "0", BATON_MAX_QUEUE_S="540")
    yield up
    assert interrupt(up) == 0


@pytest.mark.slow
def test_a_thousand_streams_at_once_are_all_answered(cluster: Up) -> None:
    gateway = cluster.pids[0]
    before = memory_mib(gateway, "VmRSS")
    running = Peak(str(cluster.line["http"]))
    done = subprocess.run(
        [
            *(CLIENTS / "python" / "bin" / "k6", "run", "--quiet", "--no-usage-report"),
            *("--env", f"BATON={cluster.line['http']}", "--env", f"STREAMS={STREAMS}", "--env", "TOKENS=32", SCRIPT),
        ],
        capture_output=True,
        text=True,
        timeout=560,
    )
    most = running.stop()
    print(
        f"{most} streams at once; the gateway had {before:.0f} MiB, then up to {memory_mib(gateway, 'VmHWM'):.0f} MiB"
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert most > 0.9 * STREAMS
    assert requests_here(str(cluster.line["http"])) == 0


class Peak:
    """Watches how many requests are at the gateway until `stop`, which returns the most."""

    def __init__(self, http: str) -> None:
        self._http = http
        self._most = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.2):
            self._most = max(self._most, requests_here(self._http))

    def stop(self) -> int:
        self._stopped.set()
        self._thread.join()
        return self._most


def requests_here(http: str) -> int:
    with urllib.request.urlopen(f"{http}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    gauges = ("baton_num_requests_running{", "baton_num_requests_waiting{")
    return sum(int(float(line.split()[1])) for line in lines if line.startswith(gauges))


def memory_mib(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{field}:")) / 1024
