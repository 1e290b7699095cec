"""Listening sockets for servers other than gRPC's."""

import socket

from baton.rpc.server import ListenAddress, bindable_host, cannot_listen, has_ipv6

_BACKLOG = 64


def bind(listen: str, *, field: str, shared: bool = False, backlog: int = _BACKLOG) -> socket.socket | None:
    """The listening socket for a setting. Returns None if the setting is "off".

    Args:
        shared: other processes of this user may listen on the same port.

    Raises:
        ConfigError: the setting is not an address, or no server can listen there.
    """
    if listen == "off":
        return None
    where = ListenAddress.parse(listen, field=field)
    host = bindable_host(where.host, ipv6=has_ipv6())
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if host == "::":  # over IPv4, too, whatever the machine's default is
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((host, where.port))
        bound.listen(backlog)  # at once, so that no other process can take the port
    except OSError as error:
        bound.close()
        raise cannot_listen(listen, error, field=field, allowed=("host:port", "off")) from None
    bound.setblocking(False)
    return bound


def address_of(bound: socket.socket) -> str:
    """The host:port at which this machine reaches the socket."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
