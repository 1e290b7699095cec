"""gRPC servers with health and reflection, and the signals that end a process.

In health checks the empty service name stands for live, and each service's own name for ready.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.core.errors import ConfigError
from baton.core.limits import KEEPALIVE_S
from baton.rpc.channels import MESSAGE_BYTES_MAX, channel_options
from baton.rpc.guard import Authorize
from baton.rpc.malformed import RefuseMalformed
from baton.rpc.moved_calls import RefuseMovedCalls
from baton.rpc.reflection import V1, V1_ALPHA, add_reflection
from baton.rpc.secure_server import Protection

# gRPC's own refusals have no details. So gRPC accepts messages up to this multiple of the limit, and `RefuseMalformed`
# refuses those above the limit. It is lower where strangers call, since gRPC holds three times what it accepts.
_ACCEPTED_MULTIPLE = 2.0
_ACCEPTED_MULTIPLE_OF_CLIENTS = 1.25
_HEALTH_REQUEST_BYTES_MAX = 4096
_EVERYWHERE = ("0.0.0.0", "[::]")


@dataclass(frozen=True)
class ListenAddress:
    """The host:port of a setting.

    Raises:
        ConfigError: the text has another form.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, field: str) -> "ListenAddress":
        host, _, port = text.rpartition(":")
        # NOTE: isdigit is true for digits that int refuses, such as a superscript two.
        if not _is_host(host) or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
            raise ConfigError(f"{field} is {text!r}", field=field, value=text, allowed=("host:port",))
        if ":" in host and not (host[0] == "[" and host[-1] == "]"):
            cure = "put an IPv6 address in brackets, such as [::1]:7000"
            raise ConfigError(f"{field} is {text!r}", field=field, value=text, allowed=("host:port",), cure=cure)
        return cls(host, int(port))


def _is_host(host: str) -> bool:
    """Whether a resolver accepts the name; it would raise UnicodeError for an empty or long label."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return bool(host) and host.isprintable() and not any(each in host for each in " ,/\\@")


def check_advertised(text: str | None) -> None:
    """Checks the address that a process advertises to others.

    Raises:
        ConfigError: it is not host:port, or is a wildcard address, which no process can connect to.
    """
    if text and ListenAddress.parse(text, field="advertise").host in _EVERYWHERE:
        cure = "give an address under which other machines reach this one"
        raise ConfigError(
            f"advertise is {text!r}, to which no process can connect", field="advertise", value=text, cure=cure
        )


def listens_everywhere(listen: str) -> bool:
    """Whether the address is a wildcard. Other processes then need another address to connect to."""
    return ListenAddress.parse(listen, field="listen").host in _EVERYWHERE


def bindable_host(host: str, *, ipv6: bool) -> str:
    """The host as a socket takes it, without brackets. On a machine without IPv6 `[::]` is 0.0.0.0, as for gRPC."""
    return "0.0.0.0" if host == "[::]" and not ipv6 else host.removeprefix("[").removesuffix("]")


def has_ipv6() -> bool:
    """Whether the kernel has IPv6. `[::]` then takes connections over IPv4, too."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def why_taken(where: ListenAddress) -> OSError | None:
    """Why no server can listen there. Returns None if one can."""
    host = bindable_host(where.host, ipv6=has_ipv6())
    try:
        found = socket.getaddrinfo(host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0]) as probe:
            # Without this option ended connections keep the port for a minute.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
            probe.listen()
    except OSError as error:
        return error
    return None


def cannot_listen(
    listen: str, error: OSError | None, *, field: str, allowed: tuple[str, ...] = ("host:port",)
) -> ConfigError:
    """The error of a setting at whose address no server can listen, with the cure for this reason."""
    reason = "" if error is None else f": {(error.strerror or str(error)).lower()}"
    if isinstance(error, socket.gaierror):
        cure = "give an address of this machine, or a name that it can resolve"
    elif error is not None and error.errno == errno.EADDRNOTAVAIL:
        cure = "the address belongs to another machine or family: give one of this machine"
    elif error is not None and error.errno == errno.EACCES:
        cure = "ports below 1024 may need root: take a higher one; port 0 picks a free one"
    else:
        cure = "the port may be in use; port 0 picks a free one"
    return ConfigError(f"cannot listen on {listen}{reason}", field=field, value=listen, allowed=allowed, cure=cure)


class HealthService(health.aio.HealthServicer):
    """The standard health service with `List`, which grpcio's own does not answer. The empty name is the process."""

    def __init__(self) -> None:
        super().__init__()
        self._statuses: dict[str, Any] = {"": health_pb2.HealthCheckResponse.SERVING}

    async def set(self, service: str, status: Any) -> None:
        self._statuses[service] = status
        await super().set(service, status)

    async def List(  # noqa: N802 (gRPC's name)
        self,
        request: Any,  # noqa: ARG002
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> Any:
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]


class GrpcServer:
    """The gRPC server of one process. `async with` does not start it: call `start` after adding the services.

    Args:
        shared: other processes of this user may listen on the same port; the kernel gives each connection to one.
        protection: None: without TLS, and every peer may call everything.
        health_listen: host:port of a second server without TLS, with the health service only; "off": none.
        receive_bytes_max: largest message. A larger one is refused as malformed, and one of more than twice that size
            (of clients, more than 1.25 times) with gRPC's own RESOURCE_EXHAUSTED.
        bounded: clients call this server. Messages have no more fields than their requests need (`RefuseMalformed`),
            and gRPC holds little of calls that have not asked for their message.
    """

    def __init__(
        self,
        listen: str,
        *,
        advertise: str | None,
        keepalive_s: float = KEEPALIVE_S,
        shared: bool = False,
        protection: Protection | None = None,
        health_listen: str = "off",
        receive_bytes_max: int = MESSAGE_BYTES_MAX,
        bounded: bool = False,
    ) -> None:
        accepted = int((_ACCEPTED_MULTIPLE_OF_CLIENTS if bounded else _ACCEPTED_MULTIPLE) * receive_bytes_max)
        options = channel_options(keepalive_s=keepalive_s, shared=shared, receive_bytes_max=accepted)
        if bounded:
            # Otherwise gRPC holds megabytes of each call that has not asked for its message: 48 calls took 150 MiB. A
            # message that a call asks for gets a window of its size, whatever this says.
            options.append(("grpc.http2.bdp_probe", 0))
        interceptors: list[grpc.aio.ServerInterceptor] = [RefuseMalformed(receive_bytes_max, bounded=bounded)]
        if protection is not None:
            interceptors.insert(0, Authorize(protection.guard))
        interceptors.insert(0, RefuseMovedCalls())
        self.grpc = grpc.aio.server(interceptors=interceptors, options=options)
        self.health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self._service_names: tuple[str, ...] = ()
        where = ListenAddress.parse(listen, field="listen")
        check_advertised(advertise)
        credentials = None if protection is None else protection.credentials
        port = _add_port(self.grpc, listen, "listen", credentials, shared=shared)
        self._health_only: grpc.aio.Server | None = None
        if health_listen != "off":
            # Its callers are not authenticated, so it buffers no message larger than a health check needs.
            limit = _HEALTH_REQUEST_BYTES_MAX
            small = channel_options(keepalive_s=keepalive_s, shared=shared, receive_bytes_max=limit)
            self._health_only = grpc.aio.server(interceptors=[RefuseMalformed(limit)], options=small)
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._health_only)
            _add_port(self._health_only, health_listen, "health_listen", None, shared=shared)
        host = "127.0.0.1" if where.host in _EVERYWHERE else where.host
        self.address = advertise or f"{host}:{port}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self.grpc.stop(grace=0.5)
        if self._health_only is not None:
            await self._health_only.stop(grace=0.5)

    async def start(self, services: Sequence[str]) -> None:
        """Starts serving: live at once, ready after `set_ready`."""
        add_reflection((*services, health.SERVICE_NAME), self.grpc)
        self._service_names = (*services, health.SERVICE_NAME, V1_ALPHA, V1)
        await self.grpc.start()
        if self._health_only is not None:
            await self._health_only.start()
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(ready=False)

    async def set_ready(self, *, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self.health.set(name, status.SERVING if ready else status.NOT_SERVING)


def _add_port(
    server: grpc.aio.Server, listen: str, field: str, credentials: grpc.ServerCredentials | None, *, shared: bool
) -> int:
    """Adds a port to a server and returns its number. Raises ConfigError if no server can listen there."""
    where = ListenAddress.parse(listen, field=field)
    # Checked first, because gRPC logs lines of its own about a port that it cannot have.
    if not shared and (error := why_taken(where)) is not None:
        raise cannot_listen(listen, error, field=field)
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials)
    except RuntimeError:
        port = 0
    if port == 0:
        raise cannot_listen(listen, None, field=field)
    return port


def stop_on_signals(event: asyncio.Event | None = None) -> asyncio.Event:
    """Makes SIGTERM and SIGINT set an event, and returns it; a second signal ends the process at once."""
    event = asyncio.Event() if event is None else event
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if event.is_set():
            logging.shutdown()
            os._exit(128 + number)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return event
