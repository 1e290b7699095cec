"""A Mooncake Store of real processes: its master, and a process that gives memory."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtransfer.stores.mooncake_process import MooncakeProcess
from tests.clients.install import install_mooncake

DEADLINE_S = 60.0
MEMORY_MB = 64


class MooncakeCluster:
    """Master and memory; either can be stopped, killed and started again.

    Attributes:
        url: of the master, also while it does not run.
    """

    def __init__(self, programs: Path, folder: Path, memory_mb: int) -> None:
        self._programs, self._folder, self._memory_mb = programs, folder, memory_mb
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ports = free_ports(3)
        self.url = f"mooncake://127.0.0.1:{self._ports[0]}"

    @property
    def port(self) -> int:
        return self._ports[0]

    def start_master(self) -> None:
        rpc, metrics, _ = self._ports
        self._start("mooncake_master", f"--rpc_port={rpc}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1")
        until(lambda: accepts_connections(rpc))

    def start_memory(self) -> None:
        """Returns once the store takes and gives an object."""
        rpc, _, own = self._ports
        self._start(
            "mooncake_client",
            *("--host=127.0.0.1", f"--port={own}", "--metadata_server=P2PHANDSHAKE"),
            *(f"--master_server_address=127.0.0.1:{rpc}", f"--global_segment_size={self._memory_mb} MB"),
        )
        process = MooncakeProcess("127.0.0.1", rpc, 4096)
        try:
            until(lambda: process.wait_ready(DEADLINE_S) and _takes_and_gives(process))
        finally:
            process.close()

    def signal(self, program: str, number: signal.Signals) -> None:
        self._running[program].send_signal(number)

    def kill(self, program: str) -> None:
        running = self._running.pop(program)
        running.kill()
        running.wait(DEADLINE_S)

    def close(self) -> None:
        for program in list(self._running):
            self.kill(program)

    def _start(self, program: str, *arguments: str) -> None:
        assert program not in self._running
        with (self._folder / f"{program}.log").open("a") as log:
            self._running[program] = subprocess.Popen(
                [self._programs / program, *arguments], stdout=log, stderr=subprocess.STDOUT
            )


@contextmanager
def mooncake_cluster(folder: Path, *, memory_mb: int = MEMORY_MB) -> Iterator[MooncakeCluster]:
    """A cluster that runs. While it is open, child processes find Mooncake's client and its libraries."""
    place = install_mooncake()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.MonkeyPatch.context() as patch:
        packages = str(place / "lib" / version / "site-packages")
        patch.setattr(sys, "path", [*sys.path, packages])
        patch.setenv("PYTHONPATH", packages, prepend=os.pathsep)
        patch.setenv("LD_LIBRARY_PATH", str(place / "system"), prepend=os.pathsep)
        cluster = MooncakeCluster(place / "bin", folder, memory_mb)
        try:
            cluster.start_master()
            cluster.start_memory()
            yield cluster
        finally:
            cluster.close()


def _takes_and_gives(process: MooncakeProcess) -> bool:
    with process.lane() as lane:
        if lane is None:
            return False
        given = lane.call("put", ["probe"]) == [0] and lane.call("get", ["probe"]) == [4096]
        lane.call("remove", ["probe"])
        return given


def free_ports(count: int) -> list[int]:
    """Different ports that nobody uses."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(server.getsockname()[1]) for server in servers]
    finally:
        for server in servers:
            server.close()


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def until(there: Callable[[], bool]) -> None:
    """Waits for what another process does."""
    deadline = time.monotonic() + DEADLINE_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)
