"""`python -m gateway`: the gateway process, from its settings to its drain."""

import asyncio
import logging

from baton.config import GatewaySettings, fail, read_settings
from baton.errors import ConfigError
from baton.rpc.server import Address, GrpcServer, check_advertised, set_up_logging, stop_on_signals, write_ready_file
from gateway.connections import Connections
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
        model = read_served_model(settings.model, settings.model_name, settings.chat_template)
        asyncio.run(_run(settings, model))
    except ConfigError as error:
        fail(PROGRAM, error)
    except KeyboardInterrupt:
        log.info("interrupted")


async def _run(settings: GatewaySettings, model: ServedModel) -> None:
    stop = stop_on_signals()
    connections = Connections(settings, model)
    async with GrpcServer(settings.listen, advertise=settings.advertise) as server, connections:
        serving = Serving(settings, model, connections)
        add_services(server, settings, serving, connections.fleet)
        await server.start(SERVICE_NAMES)
        log.info("listening on %s, serving %s (%s)", server.address, model.name, model.architecture)
        readiness = asyncio.create_task(_report_readiness(settings, server, connections), name="readiness")
        await _until_stopped(stop, readiness, connections.upkeep)
        log.info("draining, for at most %.0f s", settings.drain_grace_s)
        readiness.cancel()
        await asyncio.wait([readiness])
        await server.set_ready(ready=False)
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


async def _report_readiness(settings: GatewaySettings, server: GrpcServer, connections: Connections) -> None:
    """Ready as long as the fleet can serve a request."""
    await connections.until_serves()
    write_ready_file(settings.ready_file, address=server.address)
    log.info("ready on %s", server.address)
    fleet = connections.fleet
    while True:
        await connections.until(fleet.serves)
        await server.set_ready(ready=True)
        await connections.until(lambda: not fleet.serves())
        await server.set_ready(ready=False)


if __name__ == "__main__":
    main()
