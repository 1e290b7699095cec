"""The gateway's HTTP server: its socket, uvicorn on the gateway's event loop, and its shutdown."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn

from baton.gateway.fleet.fleet import Fleet
from baton.gateway.http.call import Context
from baton.gateway.http.protocol import LimitedProtocol
from baton.gateway.http.routes import create_app
from baton.gateway.http.view import View
from baton.gateway.serving.serving import Serving
from baton.rpc import sockets
from baton.security.authenticator import Authenticator
from baton.security.http_tls import http_context
from baton.security.pem import Pems
from baton.security.watched import Watched
from baton.settings.gateway_config import GatewaySettings

_BACKLOG = 4096
_KEEP_ALIVE_S = 75  # for idle connections; longer than the 60 s after which common proxies close theirs
_SHUTDOWN_S = 1.0


class HttpServer:
    """Serves during the `async with` block. At its end, waits up to a second for answers in progress.

    Args:
        view: the cluster's state for operators.
        bound: the socket that `bind` returned.
        authenticator: identifies callers; None: everybody may call everything.
        pems: the certificate that clients see; None: no TLS.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        serving: Serving,
        fleet: Fleet,
        view: View,
        bound: socket.socket,
        *,
        authenticator: Authenticator | None = None,
        pems: Watched[Pems] | None = None,
    ) -> None:
        self._socket = bound
        self._context = Context(settings, serving, fleet, view, authenticator)
        self.address = sockets.address_of(bound)
        config = uvicorn.Config(
            create_app(self._context),
            http=LimitedProtocol,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=10 * int(_SHUTDOWN_S),
        )
        if pems is not None:
            config.load()
            config.ssl = http_context(pems)
        self.url = f"{'http' if pems is None else 'https'}://{self.address}"
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._server.should_exit = True
        await asyncio.wait([self._task], timeout=_SHUTDOWN_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await self._task
        self._socket.close()

    def drain(self) -> None:
        """Makes /ready answer 503, and every answer close its connection."""
        self._context.draining = True


class _Server(uvicorn.Server):
    """A server that installs no signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(listen: str, *, shared: bool = False) -> socket.socket | None:
    """Returns the listening socket for this setting, or None for `off`.

    Args:
        shared: let other processes of this user listen on the same port.

    Raises:
        ConfigError: the address is malformed, or cannot be listened on.
    """
    return sockets.bind(listen, field="http_listen", shared=shared, backlog=_BACKLOG)
