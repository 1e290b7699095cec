"""`python -m gateway`: the gateway process, from its settings to its drain."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

import uvloop

from baton.config import GatewaySettings, fail, read_settings
from baton.errors import ConfigError
from baton.model_source import find_model
from baton.rpc.server import Address, GrpcServer, check_advertised, set_up_logging, stop_on_signals, write_ready_file
from baton.supervisor import Supervisor
from gateway.connections import Connections
from gateway.http.server import HttpServer, bind
from gateway.model import ServedModel, read_served_model
from gateway.rpc.services import SERVICE_NAMES, add_services
from gateway.serving import Serving

PROGRAM = "gateway"

log = logging.getLogger("baton")


def main(argv: list[str] | None = None) -> None:
    """Ends with exit code 2 on a setting that cannot work, else 0."""
    settings = read_settings(GatewaySettings, PROGRAM, argv)
    set_up_logging(settings.log_level, PROGRAM)
    try:
        Address.parse(settings.listen, field="listen")
        check_advertised(settings.advertise)
        supervisor = Supervisor(settings.supervisor)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            # Bound first, because looking for the model can take long.
            server = runner.run(_bind(settings))
            http_socket = bind(settings.http_listen)
            supervisor.report("starting", address=server.address)
            settings = settings.model_copy(update={"model": find_model(settings.model, weights=False)})
            model = read_served_model(settings.model, settings.model_name, settings.chat_template)
            runner.run(_run(settings, model, server, http_socket, supervisor))
    except ConfigError as error:
        fail(PROGRAM, error)
    except KeyboardInterrupt:
        log.info("interrupted")


async def _bind(settings: GatewaySettings) -> GrpcServer:
    return GrpcServer(settings.listen, advertise=settings.advertise)


async def _run(
    settings: GatewaySettings,
    model: ServedModel,
    server: GrpcServer,
    http_socket: socket.socket | None,
    supervisor: Supervisor,
) -> None:
    stop = stop_on_signals()
    connections = Connections(settings, model)
    async with server, connections, AsyncExitStack() as doors:
        serving = Serving(settings, model, connections)
        name = settings.name or f"gateway@{server.address}"
        http = None
        if http_socket is not None:
            http = HttpServer(settings, serving, connections.fleet, name, http_socket)
            await doors.enter_async_context(http)
        add_services(server, settings, serving, connections)
        await server.start(SERVICE_NAMES)
        if http is not None:
            log.info("HTTP on http://%s", http.address)
        log.info("listening on %s, serving %s (%s)", server.address, model.name, model.architecture)
        http_address = None if http is None else f"http://{http.address}"
        readiness = asyncio.create_task(
            _report_readiness(settings, server, connections, supervisor, http=http_address), name="readiness"
        )
        await _until_stopped(stop, readiness, connections.upkeep)
        log.info("draining, for at most %.0f s", settings.drain_grace_s)
        readiness.cancel()
        await asyncio.wait([readiness])
        await server.set_ready(ready=False)
        if http is not None:
            http.drain()
        await serving.drain(settings.drain_grace_s)
    log.info("drained")


async def _until_stopped(stop: asyncio.Event, *needed: "asyncio.Task[None]") -> None:
    """Waits for the stop signal, or raises the error that ended one of the tasks that the process needs.

    It is no TaskGroup: that would raise a ConfigError as part of a group, and the process needs `needed` afterwards.
    """
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([stopping, *needed], return_when=asyncio.FIRST_COMPLETED)
        for task in needed:
            if task.done():
                await task
    finally:
        stopping.cancel()


async def _report_readiness(
    settings: GatewaySettings,
    server: GrpcServer,
    connections: Connections,
    supervisor: Supervisor,
    *,
    http: str | None,
) -> None:
    """Ready as long as the fleet can serve a request. `http` is the address of the HTTP server."""
    await connections.until_serves()
    write_ready_file(settings.ready_file, address=server.address, http=http)
    log.info("ready on %s", server.address)
    supervisor.report("ready", address=server.address, http=http)
    fleet = connections.fleet
    while True:
        await connections.until(fleet.serves)
        await server.set_ready(ready=True)
        await connections.until(lambda: not fleet.serves())
        await server.set_ready(ready=False)


if __name__ == "__main__":
    main()
