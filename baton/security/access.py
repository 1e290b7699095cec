"""Credentials with which a client reaches a gateway: its API key, and the CA of the gateway's certificate."""

from pathlib import Path

from baton.core.errors import ConfigError
from baton.core.proxies import Proxy, proxy_for
from baton.security.exposure import is_loopback
from baton.security.pem import Files, read_pems
from baton.security.tls import Dial
from baton.security.watched import Watched
from baton.settings.environment import client_access, proxy_variables

SYSTEM = "system"  # in place of a file: the public CAs that gRPC knows


def dial_gateway(target: str, *, api_key: str | None = None, tls_ca: str | Path | None = None) -> Dial | None:
    """Returns the credentials for channels to a gateway, or None for neither key nor TLS.

    A key or CA that is not given is taken from the environment.

    Raises:
        ConfigError: the CA cannot be read, or the key would cross a network unencrypted.
    """
    found = client_access()
    api_key = api_key or found.api_key
    tls_ca = tls_ca or found.tls_ca
    if not api_key and tls_ca is None:
        return None
    if tls_ca is None and not found.insecure and not is_local(target):
        message = f"the API key would go to {target} unencrypted"
        cure = "set BATON_CLIENT_CA (--client-ca), or allow it with BATON_INSECURE=true"
        raise ConfigError(message, field="tls_ca", value="", cure=cure)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    if tls_ca is None:
        return Dial(metadata=metadata)
    files = Files(None, None, None if str(tls_ca) == SYSTEM else Path(tls_ca), ca_field="client_ca")
    return Dial(Watched(files.paths, lambda: read_pems(files)), metadata=metadata)


def client_proxy(target: str) -> Proxy | None:
    """Returns the proxy for calls to host:port, or None to connect directly, as always on this machine."""
    return None if is_local(target) else proxy_for(target, proxy_variables())


def is_local(target: str) -> bool:
    """Whether a gRPC target, such as host:port or dns:///host:port, is this machine."""
    if target.startswith("unix:"):
        return True
    target = target.removeprefix("dns:///")
    return "/" not in target and is_loopback(target.rpartition(":")[0])
