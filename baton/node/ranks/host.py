"""The life of a host above 0: its ranks join host 0, compute, and end with it. The host serves only health checks.

Its ranks are child processes with plain sockets; this process relays their bytes to host 0 and back.
"""

import asyncio
import logging
import signal
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import BatonError, ConfigError, PeerRefused
from baton.core.ready_file import write_ready_file
from baton.core.supervisor import Supervisor
from baton.core.version import __version__
from baton.node.ranks.child import child_command
from baton.node.ranks.hosts import JOIN_S, Hosts
from baton.node.ranks.messages import CHANNELS
from baton.node.ranks.relay import HANDSHAKE_S, SHUTDOWN_S, Greeting, Stream, read_line, relay, set_keepalive
from baton.node.ranks.stopped import StoppedFor
from baton.rpc.server import GrpcServer
from baton.security.peers import PeerTls
from baton.settings.environment import child_environment
from baton.settings.node_config import NodeSettings

log = logging.getLogger("baton")

_RETRY_S = 0.5
_LOG_EVERY_S = 30.0
# Once host 0 or a rank is gone, ranks end by themselves within this time, also on a busy machine, unless they load or
# wait for a GPU. Ranks that need longer are killed, and host 0 then counts as lost although it may have ended in order.
_END_S = 10.0
# The same for ranks that have not loaded yet: a node whose start fails has ended within 5 s.
_LOADING_END_S = 3.0
# Time to wait for killed ranks; one in a driver's call may stay.
_REAP_S = 1.0


async def run_host(
    settings: NodeSettings,
    model: Path,
    hosts: Hosts,
    tls: PeerTls,
    server: GrpcServer,
    services: tuple[str, ...],
    supervisor: Supervisor,
) -> int:
    """Runs this host's ranks until they have ended.

    Args:
        model: directory of the model on this host.
        server: for health; ready once the ranks have joined.

    Returns:
        The exit code: 0 if host 0 ended in order.

    Raises:
        ConfigError: host 0 refuses this host, or does not answer.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with server:
        await server.start(services)
        supervisor.report("joining", address=server.address)
        joining = asyncio.create_task(_join(settings, hosts, tls), name="join")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait([joining, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            joining.cancel()
            return 0
        ranks = await joining
        assert hosts.leader is not None
        log.info(
            "ranks %d to %d joined host 0 at %s:%d",
            hosts.local[0], hosts.local[-1], hosts.leader.host, hosts.leader.port,
        )  # fmt: skip
        await server.set_ready(ready=True)
        write_ready_file(settings.ready_file, address=server.address)
        supervisor.report("ready", address=server.address)
        return await _follow(settings, model, ranks, stopping)


async def _join(settings: NodeSettings, hosts: Hosts, tls: PeerTls) -> dict[int, dict[str, Stream]]:
    """Connects each local rank's channels to host 0; retries until `JOIN_S` is over."""
    leader = hosts.leader
    assert leader is not None
    where = f"{leader.host}:{leader.port}"
    deadline, next_log_s = time.monotonic() + JOIN_S, time.monotonic()
    joined: dict[int, dict[str, Stream]] = {rank: {} for rank in hosts.local}
    for rank in hosts.local:
        for channel in CHANNELS:
            greeting = Greeting(__version__, rank, channel, settings.tensor_parallel_size, hosts.count)
            while channel not in joined[rank]:
                try:
                    joined[rank][channel] = await _dial(leader.host.strip("[]"), leader.port, greeting, tls, settings)
                except ssl.SSLCertVerificationError as error:
                    message = f"host 0 at {where} has no certificate of a {tls.role}: {error.verify_message}"
                    raise ConfigError(message, field="leader_address", value=where) from None
                except OSError as error:
                    now_s = time.monotonic()
                    if now_s > deadline:
                        message = f"host 0 does not answer at {where}: {why_no_answer(error)}"
                        raise ConfigError(message, field="leader_address", value=where, cure="start it") from None
                    if now_s >= next_log_s:
                        next_log_s = now_s + _LOG_EVERY_S
                        log.info("waiting for host 0 at %s: %s", where, why_no_answer(error))
                    await asyncio.sleep(_RETRY_S)
    return joined


def why_no_answer(error: OSError) -> str:
    """The error's text; a timeout has none."""
    return str(error) or "it accepts connections but does not answer"


async def _dial(host: str, port: int, greeting: Greeting, tls: PeerTls, settings: NodeSettings) -> Stream:
    """Connects to host 0 and greets it.

    Raises:
        OSError: host 0 does not answer.
        ConfigError: host 0 refuses this host.
    """
    async with asyncio.timeout(HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(
            host, port, ssl=tls.client, server_hostname=tls.name, ssl_shutdown_timeout=SHUTDOWN_S
        )
    stream = Stream(reader, writer)
    try:
        if not tls.admits(writer.get_extra_info("peercert")):
            raise PeerRefused(f"its certificate is not one of a {tls.role}")
        writer.write(greeting.to_line())
        answer = await read_line(reader)
        if "error" in answer:
            raise PeerRefused(str(answer["error"]))
    except BatonError as error:
        await stream.close()
        message = f"this host cannot join host 0 at {host}:{port}: {error.message}"
        raise ConfigError(message, field="host_rank", value=settings.host_rank, cure=error.cure) from None
    set_keepalive(stream, within_s=settings.keepalive_s)
    return stream


async def _follow(
    settings: NodeSettings, model: Path, ranks: dict[int, dict[str, Stream]], stopping: "asyncio.Task[bool]"
) -> int:
    carried: list[asyncio.Task[str]] = []
    progress = {rank: _Progress() for rank in ranks}
    workers: dict[int, asyncio.subprocess.Process] = {}
    for rank, streams in ranks.items():
        ends = []
        for channel in CHANNELS:
            ours, theirs = socket.socketpair()
            ends.append(theirs)
            relaying = relay(await Stream.over(ours), streams[channel], on_sent=progress[rank].sent[channel])
            carried.append(asyncio.create_task(relaying, name=f"rank-{rank}"))
        descriptors = [end.fileno() for end in ends]
        workers[rank] = await asyncio.create_subprocess_exec(
            *worker_command(*descriptors, model=model),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=descriptors,
            env=child_environment(),
        )
        for end in ends:
            end.close()
    waits = {asyncio.create_task(worker.wait(), name=f"wait-{rank}"): rank for rank, worker in workers.items()}
    stopped = asyncio.create_task(_stopped_before_serving(workers, progress), name="stopped-ranks")
    try:
        await asyncio.wait([*waits, *carried, stopping, stopped], return_when=asyncio.FIRST_COMPLETED)
        end_s = _END_S if any(each.loaded for each in progress.values()) else _LOADING_END_S
        if stopping.done() and not any(task.done() for task in (*waits, *carried)):
            # All hosts of a node get their signals together; host 0 drains first.
            log.info("got a signal to end; waiting for host 0 to drain")
            end_s = await await_drain([*waits, *carried], grace_s=settings.drain_grace_s)
        if stopped.done():
            log.error("%s: this host's ranks end, and so does the node", stopped.result())
            return 1
        return await explain_end(waits, carried, within_s=end_s)
    finally:
        stopped.cancel()
        for worker in workers.values():
            if worker.returncode is None:
                worker.kill()
        await asyncio.wait(waits, timeout=_REAP_S)
        for task in carried:
            task.cancel()


class _Progress:
    """How far a rank is, by what it has sent.

    Attributes:
        loaded: whether it has loaded its part of the model: it has answered a call.
        prepared: whether its runner is prepared: it has sent a message among the steps after that.
        sent: called when the rank has sent something, by channel.
    """

    def __init__(self) -> None:
        self.loaded = self.prepared = False
        self.sent = {"calls": self._answered_call, "steps": self._answered_step}

    def _answered_call(self) -> None:
        self.loaded = True

    def _answered_step(self) -> None:
        self.prepared = self.loaded


async def _stopped_before_serving(
    workers: "dict[int, asyncio.subprocess.Process]", progress: Mapping[int, _Progress]
) -> str:
    """Returns a line about a rank that is stopped before it is prepared, so that all ranks wait for it. Never returns
    if there is none."""
    ranks = {worker.pid: rank for rank, worker in workers.items()}
    stopped = StoppedFor(ranks)
    while True:
        if (pid := stopped.first()) is not None and not progress[ranks[pid]].prepared:
            return f"rank {ranks[pid]} (pid {pid}) is stopped by a signal (SIGSTOP) before it serves"
        await asyncio.sleep(stopped.INTERVAL_S)


async def await_drain(ends: "list[asyncio.Task[Any]]", *, grace_s: float) -> float:
    """Waits until host 0 has drained and the first of the ends comes, which it may never do.

    Returns:
        How long the others may take. All of it together is `_END_S` after the grace: pods are killed 15 s after it.
    """
    deadline_s = time.monotonic() + grace_s + _END_S
    await asyncio.wait(ends, timeout=grace_s + _END_S, return_when=asyncio.FIRST_COMPLETED)
    return max(0.0, min(_END_S, deadline_s - time.monotonic()))


async def explain_end(
    waits: "dict[asyncio.Task[int], int]", carried: "list[asyncio.Task[str]]", *, within_s: float
) -> int:
    """Waits a moment for all ranks to end, once a rank or a connection has. Logs the reason; returns the exit code."""
    # The first end explains the others.
    lost = next((task.result() for task in carried if task.done() and task.result()), "")
    if not lost and (failed := await _first_failed(waits, within_s=within_s)) is not None:
        log.error("rank %d %s: this host's ranks end, and so does the node", waits[failed], how_ended(failed.result()))
        return 1
    if lost:
        await asyncio.wait(waits, timeout=within_s)
    if all(task.done() and task.result() == 0 for task in waits):
        log.info("host 0 has ended, and so have this host's ranks")
        return 0
    log.error("host 0 is gone (%s): this host's ranks end", lost or "no answer")
    return 1


async def _first_failed(waits: "dict[asyncio.Task[int], int]", *, within_s: float) -> "asyncio.Task[int] | None":
    """The first rank that failed. Waits a moment, because a rank's connections break before its end is known."""
    waiting, deadline_s = set(waits), time.monotonic() + within_s
    while waiting:
        left_s = max(0.0, deadline_s - time.monotonic())
        done, waiting = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if failed := next((task for task in done if task.result() != 0), None):
            return failed
        if not done:
            break
    return None


def how_ended(code: int) -> str:
    """Describes in words how a process with this exit code ended."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def worker_command(calls: int, steps: int, *, model: Path) -> list[str]:
    """The command line of a rank above 0, to be started as a child of this process.

    Args:
        calls, steps: numbers of the inherited sockets.
        model: directory of the model on this host.
    """
    return child_command("baton.node.ranks.worker", calls, steps, model)
