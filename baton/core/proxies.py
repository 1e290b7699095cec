"""Finds the HTTP proxy through which a client reaches a gateway, from the environment's usual variables. Pure.

Channels between processes of the cluster never use one.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the variable that names it; `url` may have a password."""

    variable: str
    url: str

    def __str__(self) -> str:
        return f"{urlsplit(self.url).netloc.rpartition('@')[2]} ({self.variable})"


def proxy_for(target: str, variables: Mapping[str, str]) -> Proxy | None:
    """The proxy for host:port: the first of grpc_proxy, https_proxy, http_proxy and all_proxy that names an HTTP proxy,
    in lower or upper case. Returns None if there is none, or if no_grpc_proxy or no_proxy has the host: its name, a
    domain of it, its address, a network in CIDR notation, each with or without a port, or `*`.
    """
    host, _, port = target.removeprefix("dns:///").rpartition(":")
    host = host.strip("[]").lower()
    given = {name: (spelled, value) for name in _VARIABLES for spelled, value in [_read(name, variables)] if value}
    excepted = next((value for name in _EXCEPTIONS if (value := _read(name, variables)[1])), "")
    if any(_covers(each, host, port) for each in excepted.replace(",", " ").split()):
        return None
    for spelled, value in given.values():
        url = value if "://" in value else f"http://{value}"
        if url.startswith("http://") and urlsplit(url).netloc:
            return Proxy(spelled, url)
    return None


def _read(name: str, variables: Mapping[str, str]) -> tuple[str, str]:
    """The variable as it is spelled, and its value."""
    spelled = name if variables.get(name) else name.upper()
    return spelled, variables.get(spelled, "").strip()


def _covers(entry: str, host: str, port: str) -> bool:
    entry = entry.lower()
    if entry == "*":
        return True
    name, _, number = entry.rpartition(":")
    if number.isdecimal() and (":" not in name or name.endswith("]")):
        if number != port:
            return False
        entry = name
    entry = entry.strip("[]")
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of them is a name
        domain = entry.removeprefix("*").removeprefix(".")
        return bool(domain) and (host == domain or host.endswith(f".{domain}"))
