"""`python -m gateway`: the gateway process, from its settings to its drain."""

import asyncio
import logging

from baton.config import GatewaySettings, fail, read_settings
from baton.errors import ConfigError
from baton.rpc.server import Address, GrpcServer, check_advertised, set_up_logging, stop_on_signals, write_ready_file
from gateway.cluster import Cluster
from gateway.model import ServedModel, read_served_model
from gateway.service import SERVICE_NAME, GenerationService
from gateway.serving import Serving
from protos.baton.v1 import generation_pb2_grpc

PROGRAM = "gateway"

log = logging.getLogger("baton")


def main(argv: list[str] | None = None) -> None:
    """Ends with exit code 2 on a setting that cannot work, else 0."""
    settings = read_settings(GatewaySettings, PROGRAM, argv)
    set_up_logging(settings.log_level, PROGRAM)
    try:
        Address.parse(settings.listen, field="listen")
        check_advertised(settings.advertise)
        model = read_served_model(settings.model, settings.model_name)
        asyncio.run(_run(settings, model))
    except ConfigError as error:
        fail(PROGRAM, error)
    except KeyboardInterrupt:
        log.info("interrupted")


async def _run(settings: GatewaySettings, model: ServedModel) -> None:
    stop = stop_on_signals()
    cluster = Cluster(settings, model)
    async with GrpcServer(settings.listen, advertise=settings.advertise) as server, cluster:
        serving = Serving(settings, model, cluster)
        name = settings.name or f"gateway@{server.address}"
        service = GenerationService(name, serving, cluster)
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server.grpc)
        await server.start([SERVICE_NAME])
        log.info("listening on %s, serving %s (%s)", server.address, model.name, model.architecture)
        readiness = asyncio.create_task(_tell_readiness(settings, server, cluster), name="readiness")
        await _first_of(stop, readiness)
        log.info("draining, for at most %.0f s", settings.drain_grace_s)
        readiness.cancel()
        await asyncio.wait([readiness])
        await server.set_ready(ready=False)
        await serving.drain(settings.drain_grace_s)
    log.info("drained")


async def _first_of(stop: asyncio.Event, readiness: "asyncio.Task[None]") -> None:
    """Waits for the signal to end.

    Raises:
        ConfigError: readiness cannot be told.
    """
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([stopping, readiness], return_when=asyncio.FIRST_COMPLETED)
        if readiness.done():
            await readiness
    finally:
        stopping.cancel()


async def _tell_readiness(settings: GatewaySettings, server: GrpcServer, cluster: Cluster) -> None:
    """Ready as long as a request would find its nodes."""
    await cluster.until_serves()
    write_ready_file(settings.ready_file, address=server.address)
    log.info("ready on %s", server.address)
    ready = None
    while True:
        changed = cluster.changed
        if cluster.serves() != ready:
            ready = cluster.serves()
            await server.set_ready(ready=ready)
        await changed.wait()


if __name__ == "__main__":
    main()
