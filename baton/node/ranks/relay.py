"""Relays the connections of ranks on other hosts: copies bytes between a local socket and a TLS connection, both ways.

The processes at both ends use plain inherited sockets, wherever their ranks are.
"""

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass

from baton.core.errors import PeerRefused

_READ_BYTES = 1 << 18
_GREETING_BYTES_MAX = 4096
HANDSHAKE_S = 20.0
# An end that closes waits this long for the other end, which may be gone.
SHUTDOWN_S = 1.0


@dataclass(frozen=True)
class Stream:
    """Both directions of one connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def over(cls, end: socket.socket) -> "Stream":
        """Makes a stream over a local socket, which it then owns."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    @property
    def host(self) -> str:
        return str(self.writer.get_extra_info("peername")[0])

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:  # the connection broke, so it is closed
            return


@dataclass(frozen=True)
class Greeting:
    """The first line of a connection from a rank's host to host 0.

    Attributes:
        channel: `calls` or `steps`.
        ranks, hosts: numbers of the node's ranks and hosts in this host's settings.
    """

    version: str
    rank: int
    channel: str
    ranks: int
    hosts: int

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> "Greeting":
        """Reads the greeting of a host.

        Raises:
            PeerRefused: the line is not a greeting.
        """
        found = await read_line(reader)
        types = {"version": str, "rank": int, "channel": str, "ranks": int, "hosts": int}
        if found.keys() != types.keys() or any(type(found[name]) is not kind for name, kind in types.items()):
            raise PeerRefused("the greeting of a rank's host has other fields", cure="start all hosts with one version")
        return cls(**found)  # type: ignore[arg-type]


async def read_line(reader: asyncio.StreamReader) -> dict[str, object]:
    """Reads one line of JSON from a peer that is not authenticated yet.

    Raises:
        PeerRefused: no short line of JSON came in time.
    """
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            line = await reader.readuntil(b"\n")
        found = json.loads(line) if len(line) <= _GREETING_BYTES_MAX else None
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, TimeoutError, OSError) as error:
        raise PeerRefused(f"the other host sent no greeting: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise PeerRefused("the other host sent no greeting")
    return found


def set_keepalive(stream: Stream, *, within_s: float) -> None:
    """Makes the kernel break the connection within that time if the peer's host is gone or unreachable.

    It does so however busy the processes are.
    """
    raw = stream.writer.get_extra_info("socket")
    seconds = max(1, int(within_s / 3))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(within_s * 1000)))


async def relay(local: Stream, remote: Stream, *, on_sent: Callable[[], object] | None = None) -> str:
    """Copies both ways until one end closes or breaks, then closes both.

    Args:
        on_sent: called when the local end has sent something.

    Returns:
        Why the remote end closed or broke; "" if the local end did so first.
    """
    up = asyncio.create_task(_copy(local, remote, to_local=False, on_read=on_sent), name="to-host")
    down = asyncio.create_task(_copy(remote, local, to_local=True), name="from-host")
    done, waiting = await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    await asyncio.gather(local.close(), remote.close())
    return next((why for ended, why in (task.result() for task in done) if ended is remote), "")


async def _copy(
    source: Stream, target: Stream, *, to_local: bool, on_read: Callable[[], object] | None = None
) -> tuple[Stream, str]:
    """Copies one way until one end closes or breaks. Returns that end and the reason.

    NOTE: a rank that reads nothing for long, as while it captures graphs, must not stop the reading from the other
    host: the kernel there counts a peer with a full buffer as lost (TCP_USER_TIMEOUT). So data for the rank waits here.
    """
    while True:
        try:
            data = await source.reader.read(_READ_BYTES)
        except OSError as error:
            return source, str(error)
        if not data:
            return source, "it closed the connection"
        if on_read is not None:
            on_read()
        try:
            target.writer.write(data)
            if not to_local:
                await target.writer.drain()
        except OSError as error:
            return target, str(error)
