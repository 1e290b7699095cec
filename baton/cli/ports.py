"""The gateway's ports on this machine: checked before any process starts, which then binds them itself."""

from baton.core.errors import ConfigError
from baton.rpc.server import ListenAddress, why_taken
from baton.settings.environment import is_set

DEFAULT_HTTP_PORT = 8000
_HOST = "127.0.0.1"


def refuse_taken_port(port: int, *, flag: str) -> None:
    """Raises:
    ConfigError: another process listens on the port.
    """
    if not _is_free(port):
        cure = f"is a `baton up` running already? Else give {flag} another port, or 0 for a free one"
        raise ConfigError(f"port {port} of {_HOST} is taken", field=flag, value=port, cure=cure)


def http_listen(port: int | None) -> str | None:
    """Where the gateway serves HTTP: at `port`, else where the environment says (None), else at the default port, else
    at a free one.

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
