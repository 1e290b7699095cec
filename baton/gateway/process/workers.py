"""The parent process of a gateway of several workers: reserves the ports, starts the workers on them, and restarts
crashed ones.

The parent serves no requests. Its workers share counters and reach each other through it.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from baton.core.errors import ConfigError
from baton.core.ready_file import write_ready_file
from baton.core.supervisor import Supervisor
from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.core.shared_sends import SharedSends
from baton.gateway.core.shared_sessions import SharedSessions
from baton.gateway.process.process import check_doors
from baton.gateway.process.relay import Relay
from baton.gateway.process.worker_channel import Message, WorkerChannel
from baton.rpc.server import (
    ListenAddress,
    bindable_host,
    cannot_listen,
    has_ipv6,
    listens_everywhere,
    stop_on_signals,
    why_taken,
)
from baton.security.limit_table import LimitTable
from baton.settings.environment import child_environment
from baton.settings.gateway_config import GatewaySettings

log = logging.getLogger("baton")

_RESTART_S_MIN, _RESTART_S_MAX = 0.1, 5.0
_CONFIG_ERROR = 2


@contextmanager
def reserve_ports(settings: GatewaySettings) -> Iterator[GatewaySettings]:
    """Reserves the ports for the workers; yields the settings with the actual ports.

    Raises:
        ConfigError: an address cannot be bound.
    """
    with ExitStack() as stack:
        grpc_port = stack.enter_context(_reserve(settings.listen, "listen"))
        found = {"listen": _with_port(settings.listen, grpc_port)}
        if settings.http_listen != "off":
            http_port = stack.enter_context(_reserve(settings.http_listen, "http_listen"))
            found["http_listen"] = _with_port(settings.http_listen, http_port)
        if settings.metrics_listen != "off":
            metrics_port = stack.enter_context(_reserve(settings.metrics_listen, "metrics_listen"))
            found["metrics_listen"] = _with_port(settings.metrics_listen, metrics_port)
        yield settings.model_copy(update=found)


def reachable(settings: GatewaySettings) -> str:
    """The gRPC address for other processes of this machine. `settings` must contain the actual port."""
    if settings.advertise or not listens_everywhere(settings.listen):
        return settings.advertise or settings.listen
    return f"127.0.0.1:{settings.listen.rpartition(':')[2]}"


async def supervise(settings: GatewaySettings, supervisor: Supervisor) -> None:
    """Serves until SIGTERM, and then until all workers have drained.

    Args:
        settings: settings with the ports from `reserve_ports` and the directory of the model.

    Raises:
        ConfigError: the workers cannot start with these settings, or the ready file cannot be written.
    """
    stop = stop_on_signals()
    check_doors(settings)
    workers = _Workers(settings.model_copy(update={"supervisor": None, "ready_file": None}))
    readiness = asyncio.create_task(_report_readiness(settings, workers, supervisor), name="readiness")
    serving = asyncio.create_task(workers.serve(), name="workers")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        while not (serving.done() or stopping.done()):
            running = [task for task in (serving, stopping, readiness) if not task.done()]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if readiness.done():
                await readiness
    finally:
        readiness.cancel()
        stopping.cancel()
        workers.stop()
        await serving
    log.info("all workers have ended")


class _Workers:
    """The worker processes.

    Args:
        settings: settings of every worker, with the actual ports.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.addresses: Message = {}  # as a worker reported them
        self.all_ready = asyncio.Event()
        self._settings = settings
        self._counters, counters_fd = SharedCounters.create(settings.processes)
        self._limits, limits_fd = LimitTable.create(settings.processes)
        self._fds = (counters_fd, limits_fd, SharedSends.create(settings.processes), SharedSessions.create())
        self._relay = Relay()
        self._processes: dict[int, Process] = {}
        self._stopped = asyncio.Event()

    async def serve(self) -> None:
        """Runs all workers until `stop`, and then until they have ended.

        Raises:
            ConfigError: a worker cannot start with these settings.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for row in range(self._settings.processes):
                    group.create_task(self._keep_running(row), name=f"worker-{row}")
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            for fd in self._fds:
                os.close(fd)

    def stop(self) -> None:
        """Lets all workers drain."""
        self._stopped.set()
        for process in self._processes.values():
            _terminate(process)

    async def _keep_running(self, row: int) -> None:
        """Runs the worker of this row and restarts it whenever it ends, until `stop`."""
        restart_s = _RESTART_S_MIN
        while not self._stopped.is_set():
            try:
                code = await self._run(row)
            except OSError as error:  # out of memory or processes, or the child was killed at once
                log.error("worker %d cannot start: %s", row, error)
                code = -1
            was_ready = row in self._relay.ready
            self._relay.ready.discard(row)
            self._counters.retire_row(row)
            self._limits.retire_row(row)
            if self._stopped.is_set():
                return
            if code == _CONFIG_ERROR and not self.all_ready.is_set():
                self.stop()
                raise ConfigError("a worker could not start", cure="see its message above")
            restart_s = _RESTART_S_MIN if was_ready else min(2 * restart_s, _RESTART_S_MAX)
            log.error("worker %d ended with exit code %d; restarting it in %.1f s", row, code, restart_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), restart_s)

    async def _run(self, row: int) -> int:
        """Runs one process to its end; returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "baton.gateway.process.worker"),
                *map(str, (theirs.fileno(), *self._fds, row)),
                stdin=asyncio.subprocess.DEVNULL, env=child_environment(),
                pass_fds=(theirs.fileno(), *self._fds),
                start_new_session=True,  # Ctrl-C reaches the parent, which lets the workers drain
            )  # fmt: skip
        self._processes[row] = process
        if self._stopped.is_set():
            _terminate(process)
        with suppress(BrokenPipeError):  # the child has ended; `wait` returns its code
            ours.sendall(json.dumps(self._settings.model_dump(mode="json")).encode() + b"\n")
        channel = WorkerChannel(ours, lambda question: self._answer(row, question))
        self._relay.add(row, channel)
        following = asyncio.create_task(channel.run(), name=f"channel-{row}")
        try:
            return await process.wait()
        finally:
            self._relay.remove(row)
            del self._processes[row]
            following.cancel()
            await asyncio.wait([following])

    async def _answer(self, row: int, question: Message) -> Message:
        if "ready" in question:
            self.addresses = question["ready"]
            self._relay.ready.add(row)
            if len(self._relay.ready) == self._settings.processes:
                self.all_ready.set()
            return {}
        within_s = question.pop("within_s")
        return {"answers": await self._relay.ask_others(row, question, within_s=within_s)}


async def _report_readiness(settings: GatewaySettings, workers: _Workers, supervisor: Supervisor) -> None:
    """Reports, once, that all workers are ready."""
    await workers.all_ready.wait()
    address, http = workers.addresses["address"], workers.addresses["http"]
    write_ready_file(settings.ready_file, address=address, http=http, metrics=workers.addresses["metrics"])
    log.info("ready on %s, %d workers", address, settings.processes)
    supervisor.report("ready", address=address, http=http, metrics=workers.addresses["metrics"])


def _reserve(listen: str, field: str) -> socket.socket:
    """Binds a socket that reserves the port for this user's processes. It does not listen, so it gets no connections.

    Raises:
        ConfigError: another process has the port, or the address does not belong to this machine.
    """
    where = ListenAddress.parse(listen, field=field)
    if (taken := why_taken(where)) is not None:
        raise cannot_listen(listen, taken, field=field)
    host = bindable_host(where.host, ipv6=has_ipv6())
    found = socket.getaddrinfo(host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    reserved = socket.socket(found[0][0])
    # Connections of an earlier gateway with one process do not hold the port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind(found[0][4])
    except OSError as error:
        reserved.close()
        raise cannot_listen(listen, error, field=field) from None
    return reserved


def _with_port(listen: str, reserved: socket.socket) -> str:
    return f"{listen.rpartition(':')[0]}:{reserved.getsockname()[1]}"


def _terminate(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
