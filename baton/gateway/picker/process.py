"""The picker's service and process, from its settings to its drain."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from time import monotonic
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2

from baton.core.errors import BatonError, ConfigError, Overloaded
from baton.core.file_limit import raise_file_limit
from baton.core.logs import dropped_lines, set_up_logging, show_name
from baton.core.ready_file import check_ready_file, write_ready_file
from baton.core.supervisor import Supervisor
from baton.gateway.picker.choice import GatewayChoice, Picked, PickRequest
from baton.gateway.picker.exchange import Exchange
from baton.gateway.picker.gateways import GatewayPool
from baton.metrics.exposition import Exposition, Figure
from baton.metrics.metric import ProcessRole
from baton.metrics.page import join
from baton.metrics.port import MetricsPort
from baton.metrics.tally import Layout, Tally
from baton.protos.ext_proc import external_processor_pb2 as pb
from baton.protos.ext_proc import external_processor_pb2_grpc
from baton.rpc import sockets
from baton.rpc.guard import OpenGuard
from baton.rpc.secure_server import Protection, watch_client_pems
from baton.rpc.server import GrpcServer, ListenAddress, stop_on_signals
from baton.security.exposure import check_exposed
from baton.security.pem import Files
from baton.security.tls import client_server_credentials
from baton.settings.gateway_config import PickerSettings
from baton.settings.reader import fail

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
PROGRAM = "picker"

log = logging.getLogger("baton")

_MESSAGE_BYTES_MAX = 64 << 20  # a buffering proxy sends a whole body
LIVENESS, READINESS = "liveness", "readiness"  # service names that the endpoint picker protocol defines


def start(settings: PickerSettings) -> None:
    """Serves until SIGTERM. Exits with 2 if a setting is wrong, else with 0."""
    set_up_logging(settings.log_level, role=PROGRAM, name=settings.name or "", form=settings.log_format)
    try:
        raise_file_limit()
        check_ready_file(settings.ready_file)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(settings, Supervisor(settings.supervisor)))
    except ConfigError as error:
        fail(PROGRAM, error)
    except KeyboardInterrupt:
        log.info("interrupted")


def new_choice(settings: PickerSettings) -> GatewayChoice:
    """Creates the choice. A report may be as old as a pause and a slow answer together before it is stale."""
    stale_s = settings.poll_s + settings.stale_s
    return GatewayChoice(stale_s=stale_s, fallbacks=settings.fallbacks, shed_waiting=settings.shed_waiting)


class CountedPicks:
    """A `GatewayChoice` on this machine's clock, with metrics."""

    def __init__(self, choice: GatewayChoice) -> None:
        self._choice = choice
        self._tally = Tally(Layout(ProcessRole.PICKER))
        self._exposition = Exposition(ProcessRole.PICKER, self._tally.layout, "")
        self._outcomes = self._tally.counters("baton_picker_picks_total")
        self._affinities = self._tally.counters("baton_picker_picks_by_affinity_total")
        self._failovers = self._tally.counter("baton_picker_failovers_total")

    def pick(self, wanted: PickRequest) -> Picked:
        try:
            picked = self._choice.pick(wanted, monotonic())
        except BatonError as error:
            self._outcomes["shed" if isinstance(error, Overloaded) else "no_gateway"].add()
            raise
        self._outcomes["picked"].add()
        self._affinities[picked.affinity].add()
        return picked

    def served(self, picked: Picked, address: str) -> None:
        if address != picked.addresses[0]:
            self._failovers.add()
            self._choice.doubt(picked.addresses[0], monotonic())

    async def page(self, names: frozenset[str] = frozenset()) -> bytes:
        """Returns the metrics in Prometheus' text format."""
        return await join(self._exposition.pages(self._tally.own(), list(self._figures()), names))

    def _figures(self) -> Iterator[Figure]:
        yield Figure("baton_log_lines_dropped_total", dropped_lines())
        for state, number in zip(("ready", "not_ready"), self._choice.count(monotonic()), strict=True):
            yield Figure("baton_picker_gateways", number, (state,))


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):
    """The service that a proxy calls for each request.

    Args:
        sheddable: names of objectives whose requests may be refused.
    """

    def __init__(self, picks: CountedPicks, sheddable: frozenset[str]) -> None:
        self._picks = picks
        self._sheddable = sheddable

    async def Process(
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ProcessingResponse]:
        exchange = Exchange(self._picks, self._sheddable)
        async for request in request_iterator:
            for response in exchange.receive(request):
                yield response
            if exchange.ended:
                return


def serve_picks(settings: PickerSettings, choice: GatewayChoice) -> tuple[GrpcServer, CountedPicks]:
    """Creates the server with its service, without starting it. Needs a running event loop.

    Raises:
        ConfigError: the server cannot listen, or other machines would reach it without TLS.
    """
    files = Files(settings.client_tls_cert, settings.client_tls_key, None, "client_tls_cert", "client_tls_key")
    pems = watch_client_pems(files)
    where = ListenAddress.parse(settings.listen, field="listen")
    check_exposed(where, field="listen", tls=pems is not None, tls_field="client_tls_cert", insecure=settings.insecure)
    server = GrpcServer(
        settings.listen,
        advertise=settings.advertise,
        protection=Protection(None if pems is None else client_server_credentials(pems), OpenGuard()),
        health_listen=settings.health_listen,
        receive_bytes_max=_MESSAGE_BYTES_MAX,
    )
    picks = CountedPicks(choice)
    sheddable = frozenset(name.strip() for name in settings.sheddable.split(",") if name.strip())
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(
        ExternalProcessor(picks, sheddable), server.grpc
    )
    return server, picks


async def start_serving(server: GrpcServer) -> None:
    """Starts the server, which is live at once and ready after `set_ready`."""
    await server.start([SERVICE_NAME])
    await server.health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
    await set_ready(server, ready=False)


async def set_ready(server: GrpcServer, *, ready: bool) -> None:
    """Sets the readiness under all service names that the protocol defines."""
    status = health_pb2.HealthCheckResponse
    await server.set_ready(ready=ready)
    await server.health.set(READINESS, status.SERVING if ready else status.NOT_SERVING)


async def _run(settings: PickerSettings, supervisor: Supervisor) -> None:
    stop = stop_on_signals()
    choice = new_choice(settings)
    async with AsyncExitStack() as stack:
        server, picks = serve_picks(settings, choice)
        await stack.enter_async_context(server)
        show_name(settings.name or f"{PROGRAM}@{server.address}")
        bound = sockets.bind(settings.metrics_listen, field="metrics_listen")
        port = await stack.enter_async_context(MetricsPort(bound, picks.page))
        gateways = await stack.enter_async_context(GatewayPool(settings, choice))
        await start_serving(server)
        log.info("listening on %s", server.address)
        stopping = asyncio.create_task(stop.wait(), name="stop")
        knowing = asyncio.create_task(gateways.until_known(), name="until known")
        await asyncio.wait([stopping, knowing, gateways.upkeep], return_when=asyncio.FIRST_COMPLETED)
        if knowing.done():
            await set_ready(server, ready=True)
            write_ready_file(settings.ready_file, address=server.address, metrics=port.url)
            log.info("ready on %s", server.address)
            supervisor.report("ready", address=server.address, metrics=port.url)
            await asyncio.wait([stopping, gateways.upkeep], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, knowing):
            task.cancel()
        if gateways.upkeep.done():
            await gateways.upkeep  # raises what ended it
        log.info("draining, for at most %.0f s", settings.drain_grace_s)
        await set_ready(server, ready=False)
        await server.grpc.stop(settings.drain_grace_s)
    log.info("drained")
