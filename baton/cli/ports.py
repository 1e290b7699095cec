"""Checks the gateway's ports before any process starts. The gateway itself binds them later."""

from baton.core.errors import ConfigError
from baton.rpc.server import ListenAddress, why_taken
from baton.settings.environment import is_set

DEFAULT_HTTP_PORT = 8000
_HOST = "127.0.0.1"


def refuse_taken_port(port: int, *, flag: str) -> None:
    """Checks that a port is free.

    Raises:
        ConfigError: another process listens on the port.
    """
    if not _is_free(port):
        cure = f"end the `baton up` that may run already, or give {flag} another port, or 0 for a free one"
        raise ConfigError(f"port {port} of {_HOST} is in use", field=flag, value=port, cure=cure)


def http_listen(port: int | None) -> str | None:
    """Returns the address at which the gateway serves HTTP: `port`, else the default port, else a free one.

    Returns None if `port` is None and the environment names the address.
    Raises:
        ConfigError: `port` is taken.
    """
    if port is not None:
        refuse_taken_port(port, flag="--http-port")
    elif is_set("http_listen"):
        return None
    else:
        port = DEFAULT_HTTP_PORT if _is_free(DEFAULT_HTTP_PORT) else 0
    return f"{_HOST}:{port}"


def _is_free(port: int) -> bool:
    return why_taken(ListenAddress(_HOST, port)) is None
