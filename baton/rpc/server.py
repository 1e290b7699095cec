"""Starts and stops a gRPC server with health and reflection, and waits for the signals that end a process.

Health: the empty service name means live, every service's own name means ready.
"""

import asyncio
import json
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.errors import ConfigError

MESSAGE_BYTES_MAX = 256 << 20
_EVERYWHERE = ("0.0.0.0", "[::]")

# gRPC's own limit, from 1000 on, ends calls of a burst at random, as cancelled and unseen by any service. How many may
# run is for services to say, with an error that tells so.
_PENDING_CALLS_MAX = 1 << 20


def channel_options(*, keepalive_s: float) -> list[tuple[str, int]]:
    """Options for servers and channels alike: large prompts, and pings that notice a peer that went silent."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", _PENDING_CALLS_MAX),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS_MAX),
    ]


def connect(address: str, *, keepalive_s: float = 10.0) -> grpc.aio.Channel:
    """A channel with our options; reconnects fast, because nodes come and go."""
    options = [
        *channel_options(keepalive_s=keepalive_s),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),  # also the time that an attempt may take; on a busy machine it does
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.enable_retries", 0),
        # NOTE: with the shared global pool a new incarnation at a known address would inherit a dead connection.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


@dataclass(frozen=True)
class Address:
    """host:port as given on a command line.

    Raises:
        ConfigError: not of that form.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, field: str) -> "Address":
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{field} is {text!r}", field=field, value=text, allowed=("host:port",))
        return cls(host, int(port))


def check_advertised(text: str | None) -> None:
    """Looks at an address that others are to be told.

    Raises:
        ConfigError: nobody could reach a process under it.
    """
    if text and Address.parse(text, field="advertise").host in _EVERYWHERE:
        cure = "give an address under which other machines reach this one"
        raise ConfigError(f"advertise is {text!r}, which is everywhere", field="advertise", value=text, cure=cure)


def listens_everywhere(listen: str) -> bool:
    """Whether a process listens on all addresses of its machine, none of which is the one to tell others."""
    return Address.parse(listen, field="listen").host in _EVERYWHERE


class GrpcServer:
    """One process's server. `async with` starts nothing: call `start` once the services are added."""

    def __init__(self, listen: str, *, advertise: str | None, keepalive_s: float = 10.0) -> None:
        self.grpc = grpc.aio.server(options=channel_options(keepalive_s=keepalive_s))
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self._service_names: tuple[str, ...] = ()
        where = Address.parse(listen, field="listen")
        check_advertised(advertise)
        try:
            port = self.grpc.add_insecure_port(listen)
        except RuntimeError:
            port = 0
        if port == 0:
            cure = "another process may have the port, or this machine no such address; port 0 takes a free port"
            raise ConfigError(f"cannot listen on {listen}", field="listen", value=listen, cure=cure)
        host = "127.0.0.1" if where.host in _EVERYWHERE else where.host
        self.address = advertise or f"{host}:{port}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.grpc.stop(grace=0.5)

    async def start(self, services: Sequence[str]) -> None:
        """Serves: live at once, and not ready until `set_ready`."""
        self._service_names = (*services, health.SERVICE_NAME)
        reflection.enable_server_reflection((*self._service_names, reflection.SERVICE_NAME), self.grpc)
        await self.grpc.start()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready=False)

    async def set_ready(self, *, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self.health.set(name, status.SERVING if ready else status.NOT_SERVING)


def write_ready_file(path: Path | None, *, address: str) -> None:
    """Tells whoever started this process that it is ready, in one atomic step.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    temporary = path.parent / f"{path.name}.part"
    try:
        temporary.write_text(json.dumps({"address": address, "pid": os.getpid()}) + "\n")
        temporary.replace(path)
    except OSError as error:
        what = f"BATON_READY_FILE (--ready-file) is {str(path)!r}, which cannot be written: {error.strerror}"
        raise ConfigError(
            what, field="ready_file", value=path, cure="name a file in a folder that is writable"
        ) from None


def stop_on_signals() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. A second signal ends the process at once."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if event.is_set():
            os._exit(128 + number)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return event


def set_up_logging(level: str, process: str) -> None:
    """Log lines to stderr: time, process, level, message."""
    logging.basicConfig(
        level=level.upper(), format=f"%(asctime)s {process} %(levelname)s %(message)s", datefmt="%H:%M:%S", force=True
    )
