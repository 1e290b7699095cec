"""Runs one process that serves requests, from its start to its drain: the whole gateway, or one of its workers."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

from baton.core.garbage import keep_collections_rare
from baton.core.logs import count_dropped_lines, show_name
from baton.gateway.core.shared_sends import SharedSends
from baton.gateway.core.shared_sessions import SharedSessions
from baton.gateway.grpc.services import SERVICE_NAMES, add_services
from baton.gateway.http.cors import AllowedOrigins
from baton.gateway.http.server import HttpServer, bind
from baton.gateway.http.view import View
from baton.gateway.observe.tracing.start import tracing
from baton.gateway.request.balance import BalanceRules
from baton.gateway.request.balance_loop import keep_balance
from baton.gateway.request.connections import Connections
from baton.gateway.serving.other_workers import OtherWorkers, SingleWorker
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import ServedModel
from baton.metrics.port import MetricsPort
from baton.rpc import sockets
from baton.rpc.secure_server import protect_client_server, watch_client_pems
from baton.rpc.server import GrpcServer, ListenAddress, stop_on_signals
from baton.security.authenticator import Authenticator
from baton.security.exposure import check_exposed
from baton.security.limit_table import LimitTable
from baton.security.pem import Files, Pems
from baton.security.watched import Watched
from baton.settings.config import MIB
from baton.settings.gateway_config import GatewaySettings

log = logging.getLogger("baton")

# A worker waits at most this long for nodes before it accepts connections. Clients then get an error, not silence.
_NODES_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class BoundSockets:
    """The bound ports of one process, with authentication and TLS of clients.

    Attributes:
        http: socket of the HTTP server; None: there is none.
        metrics: socket of the metrics port; None: there is none.
        door: authenticates clients.
        pems: certificate and key that clients see; None: no TLS.
    """

    server: GrpcServer
    http: socket.socket | None
    metrics: socket.socket | None
    door: Authenticator
    pems: Watched[Pems] | None


@dataclass(frozen=True)
class Addresses:
    """Addresses of a ready gateway.

    Attributes:
        http: URL of the HTTP server; None: there is none.
        metrics: URL of the metrics port; None: metrics are served only at /metrics of the HTTP server.
    """

    address: str
    http: str | None
    metrics: str | None


@dataclass(frozen=True)
class SharedMemory:
    """What all workers of a gateway write, besides their counters.

    Attributes:
        limits: what clients have used of their limits.
        sends: what was sent to each node.
        sessions: nodes that served each session last.
    """

    limits: LimitTable
    sends: SharedSends
    sessions: SharedSessions


OnReady = Callable[[Addresses], None]


def bind_ports(
    settings: GatewaySettings, *, shared: bool = False, limit_table: LimitTable | None = None
) -> BoundSockets:
    """Binds all ports. Needs a running event loop.

    Args:
        shared: whether other workers bind the same ports, which their parent has reserved.
        limit_table: where all workers count what clients use; None: there are no others.

    Raises:
        ConfigError: an address cannot be bound, or other machines could reach a port without TLS.
    """
    door, pems = Authenticator(settings, limit_table), watch_client_pems(_client_files(settings))
    check_doors(settings)
    server = GrpcServer(
        settings.listen,
        advertise=settings.advertise,
        shared=shared,
        protection=protect_client_server(pems, door),
        health_listen=settings.health_listen,
        receive_bytes_max=int(settings.http_body_mib * MIB),
        bounded=True,
    )
    metrics = sockets.bind(settings.metrics_listen, field="metrics_listen", shared=shared)
    return BoundSockets(server, bind(settings.http_listen, shared=shared), metrics, door, pems)


def check_doors(settings: GatewaySettings) -> None:
    """Checks that other machines cannot reach a port without TLS, unless `insecure` is set, and which pages may call.

    Raises:
        ConfigError: other machines could reach a port without TLS, or `cors_origins` is wrong.
    """
    AllowedOrigins.read(settings.cors_origins, locked=settings.locked)
    doors = {"listen": settings.listen}
    if settings.http_listen != "off":
        doors["http_listen"] = settings.http_listen
    for field, listen in doors.items():
        check_exposed(
            ListenAddress.parse(listen, field=field),
            field=field,
            tls=settings.client_tls_cert is not None,
            tls_field="client_tls_cert",
            insecure=settings.insecure,
        )


def _client_files(settings: GatewaySettings) -> Files:
    return Files(settings.client_tls_cert, settings.client_tls_key, None, "client_tls_cert", "client_tls_key")


async def run(
    settings: GatewaySettings,
    model: ServedModel,
    bound: BoundSockets | None,
    on_ready: OnReady,
    *,
    other_workers: OtherWorkers | None = None,
    shared: SharedMemory | None = None,
) -> None:
    """Serves until SIGTERM, and then until requests have ended.

    Args:
        bound: the ports; None: this process is a worker, which binds its ports once it can serve.
        on_ready: called once, when nodes can serve.
        other_workers: connection to the other workers; None: there are none.
        shared: what all workers write, besides their counters.

    Raises:
        ConfigError: a node address is malformed, or a chat template is invalid or takes too long or too much memory.
    """
    stop = stop_on_signals()
    async with AsyncExitStack() as stack:
        stack.callback(model.close)
        checking = asyncio.create_task(model.renderer.check(), name="chat template")
        stack.callback(checking.cancel)
        if bound is not None:
            await stack.enter_async_context(bound.server)
        connections = Connections(settings, model)
        if shared is not None:
            connections.fleet.share(shared.sends, shared.sessions)
        await stack.enter_async_context(connections)
        if bound is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_NODES_TIMEOUT_S):
                    await connections.until_serves()
            bound = bind_ports(settings, shared=True, limit_table=None if shared is None else shared.limits)
            await stack.enter_async_context(bound.server)
        await _until_stopped(stop, checking)
        server = bound.server
        name = settings.name or f"gateway@{server.address}"
        other_workers = other_workers or SingleWorker()
        count_dropped_lines(other_workers.shared_counters.tally.counter("baton_log_lines_dropped_total").add)
        traces = tracing(other_workers.shared_counters.tally, instance=name, model_name=model.name)
        tracer = await stack.enter_async_context(traces)
        serving = Serving(settings, model, connections, other_workers, tracer)
        view = await stack.enter_async_context(View(settings, serving, connections.fleet, name))
        show_name(name)
        http = None
        if bound.http is not None:
            http = HttpServer(
                settings, serving, connections.fleet, view, bound.http, authenticator=bound.door, pems=bound.pems
            )
            await stack.enter_async_context(http)
        add_services(server, settings, serving, connections, view)
        await server.start(SERVICE_NAMES)
        keep_collections_rare()
        if http is not None:
            log.info("HTTP on %s", http.url)
        if bound.pems is not None and not bound.door.locked:
            log.warning("clients need no key: everyone who can reach the ports can send requests")
        log.info("listening on %s, serving %s (%s)", server.address, model.name, model.architecture)
        for warning in model.chat.warnings:
            log.warning("%s", warning)
        port = await stack.enter_async_context(MetricsPort(bound.metrics, serving.metrics.page))
        if port.url is not None:
            log.info("metrics on %s", port.url)
        addresses = Addresses(server.address, None if http is None else http.url, port.url)
        tasks = [asyncio.create_task(_report_readiness(server, connections, partial(on_ready, addresses)))]
        if settings.balance_roles:
            rules = BalanceRules(settings.balance_backlog_s, settings.balance_hold_s, settings.balance_cool_down_s)
            tasks.append(asyncio.create_task(keep_balance(connections, rules), name="balance"))
        await _until_stopped(stop, *tasks, connections.upkeep)
        log.info("draining, for at most %.0f s", settings.drain_grace_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await server.set_ready(ready=False)
        if http is not None:
            http.drain()
        await serving.drain(settings.drain_grace_s)
    log.info("drained")


async def _until_stopped(stop: asyncio.Event, *needed: "asyncio.Task[None]") -> None:
    """Waits for the stop signal or the end of a needed task, and raises the error of that task.

    Not a TaskGroup, which would wrap a ConfigError in a group and would cancel tasks that the drain still needs.
    """
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([stopping, *needed], return_when=asyncio.FIRST_COMPLETED)
        for task in needed:
            if task.done():
                await task
    finally:
        stopping.cancel()


async def _report_readiness(server: GrpcServer, connections: Connections, on_ready: Callable[[], None]) -> None:
    """Reports the process as ready while the fleet can serve requests."""
    await connections.until_serves()
    on_ready()
    fleet = connections.fleet
    while True:
        await connections.until(fleet.serves)
        await server.set_ready(ready=True)
        await connections.until(lambda: not fleet.serves())
        await server.set_ready(ready=False)
