"""Where nodes are: static addresses, and names that resolve to any number of addresses."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Sequence

from baton.rpc.server import Address

log = logging.getLogger("baton")


def parse_addresses(text: str, *, field: str) -> tuple[Address, ...]:
    """The addresses of a comma-separated setting.

    Raises:
        ConfigError: one of them is not host:port.
    """
    return tuple(Address.parse(part.strip(), field=field) for part in text.split(",") if part.strip())


class Directory:
    """The addresses of one role's nodes, resolved again at each look-up."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self._last: dict[Address, frozenset[str]] = {}

    async def look_up(self) -> frozenset[str]:
        """All addresses of all names. A name that cannot be resolved keeps its last addresses."""
        found = await asyncio.gather(*(self._resolve(address) for address in self._addresses))
        return frozenset().union(*found)

    async def _resolve(self, address: Address) -> frozenset[str]:
        if _is_literal(address.host):
            return frozenset([f"{address.host}:{address.port}"])
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if address not in self._last:
                log.warning("cannot resolve %s: %s", address.host, error.strerror)
                self._last[address] = frozenset()
            return self._last[address]
        # NOTE: a node that has addresses of both families must not count twice.
        families = {family for family, *_ in answers}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        hosts = {str(where[0]) for its_family, _, _, _, where in answers if its_family == family}
        self._last[address] = frozenset(
            f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}" for host in hosts
        )
        return self._last[address]


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
