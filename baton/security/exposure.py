"""Which addresses other machines can reach, and the rule for servers there: TLS, or an explicit `--insecure`."""

import ipaddress
from typing import Protocol

from baton.core.errors import ConfigError
from baton.core.setting_names import flag, variable


class Address(Protocol):
    """host:port."""

    @property
    def host(self) -> str: ...


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches servers there. A name other than localhost may resolve to anything."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_exposed(where: Address, *, field: str, tls: bool, tls_field: str, insecure: bool) -> None:
    """Checks that a server without protection is reached by this machine only.

    Raises:
        ConfigError: other machines reach the server, and nothing protects it.
    """
    if tls or insecure or is_loopback(where.host):
        return
    message = f"{variable(field)} ({flag(field)}) is at {where.host}, which other machines reach, and there is no TLS"
    cure = f"set {variable(tls_field)}, for which `baton certs` makes files, or allow it with {flag('insecure')}"
    raise ConfigError(message, field=field, value=where.host, allowed=("an address such as 127.0.0.1",), cure=cure)
