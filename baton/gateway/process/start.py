"""Starts the gateway from its settings, in one process or in several workers."""

import asyncio
import logging

import uvloop

from baton.core.errors import ConfigError
from baton.core.file_limit import raise_file_limit
from baton.core.logs import set_up_logging
from baton.core.ready_file import check_ready_file, write_ready_file
from baton.core.supervisor import Supervisor
from baton.gateway.process import process, workers
from baton.gateway.process.worker_count import GatewayHost, choose_workers
from baton.gateway.text.model import read_served_model
from baton.models.loading.gguf.view import model_directory
from baton.rpc.server import ListenAddress, check_advertised
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import fail

PROGRAM = "gateway"

log = logging.getLogger("baton")


def start(settings: GatewaySettings) -> None:
    """Serves until SIGTERM. Exits with code 2 on a setting that cannot work, else with 0."""
    set_up_logging(settings.log_level, role=PROGRAM, name=settings.name or "", form=settings.log_format)
    supervisor = Supervisor(None)
    try:
        raise_file_limit()
        check_ready_file(settings.ready_file)
        ListenAddress.parse(settings.listen, field="listen")
        check_advertised(settings.advertise)
        settings = _with_workers(settings)
        supervisor = Supervisor(settings.supervisor)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if settings.processes > 1:
                _serve_with_workers(runner, settings, supervisor)
            else:
                _serve_alone(runner, settings, supervisor)
    except ConfigError as error:
        fail(PROGRAM, error, supervisor)
    except KeyboardInterrupt:
        log.info("interrupted")


def _with_workers(settings: GatewaySettings) -> GatewaySettings:
    """The settings with a number of workers; one that was set stays."""
    if settings.workers is not None:
        return settings
    host = GatewayHost.of_this_process(settings)
    chosen = choose_workers(host)
    level = logging.INFO if chosen.workers > 1 else logging.DEBUG
    log.log(level, "workers: %d, by default; %s; %s", chosen.workers, host, chosen.why)
    return settings.model_copy(update={"workers": chosen.workers})


def _serve_alone(runner: asyncio.Runner, settings: GatewaySettings, supervisor: Supervisor) -> None:
    def ready(found: process.Addresses) -> None:
        write_ready_file(settings.ready_file, address=found.address, http=found.http, metrics=found.metrics)
        log.info("ready on %s", found.address)
        supervisor.report("ready", address=found.address, http=found.http, metrics=found.metrics)

    # The ports are bound first, because finding the model can take long.
    bound = runner.run(_bind(settings))
    supervisor.report("starting", address=bound.server.address)
    settings = settings.model_copy(update={"model": model_directory(settings.model, weights=False)})
    model = read_served_model(
        settings.model,
        settings.model_name,
        settings.chat_template,
        max_context_tokens=settings.max_context_tokens,
        special_in_texts=settings.user_special_tokens == "allow",
    )
    runner.run(process.run(settings, model, bound, ready))


def _serve_with_workers(runner: asyncio.Runner, settings: GatewaySettings, supervisor: Supervisor) -> None:
    with workers.reserve_ports(settings) as settings:
        supervisor.report("starting", address=workers.reachable(settings))
        # NOTE: not inside the event loop, where SIGTERM would wait for the end of a download.
        settings = settings.model_copy(update={"model": model_directory(settings.model, weights=False)})
        runner.run(workers.supervise(settings, supervisor))


async def _bind(settings: GatewaySettings) -> process.BoundSockets:
    return process.bind_ports(settings)
