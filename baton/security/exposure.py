"""Tells which addresses other machines can reach. Servers there need TLS or an explicit `--insecure`."""

import ipaddress
from typing import Protocol

from baton.core.errors import ConfigError
from baton.core.setting_names import flag, variable


class Address(Protocol):
    """An address with a host."""

    @property
    def host(self) -> str: ...


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches servers at this host. Of names, only localhost is sure to resolve to it."""
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
    """Checks that a server without TLS can be reached from this machine only.

    Raises:
        ConfigError: other machines reach the server, and neither TLS nor `--insecure` is set.
    """
    if tls or insecure or is_loopback(where.host):
        return
    message = f"{variable(field)} ({flag(field)}) is at {where.host}, which other machines reach without TLS"
    cure = f"set {variable(tls_field)} (`baton certs` makes the files), or allow this with {flag('insecure')}"
    raise ConfigError(message, field=field, value=where.host, allowed=("an address such as 127.0.0.1",), cure=cure)
