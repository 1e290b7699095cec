"""The addresses of all places of one setting, now: names are resolved and files read at each look-up, Services watched.

A place that cannot be read keeps its last addresses.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from baton.rpc.server import Address
from gateway.discovery.address_file import AddressFile
from gateway.discovery.cluster import ServiceWatch
from gateway.discovery.sources import ListFile, Place, ServicePort

log = logging.getLogger("baton")


class Directory:
    """The addresses of one role's nodes. An async context manager: inside it, Services are watched.

    Args:
        on_change: called when a watched Service has changed, so that the next look-up need not wait.
    """

    def __init__(self, places: Sequence[Place], on_change: Callable[[], None] = lambda: None) -> None:
        self._addresses = [place for place in places if isinstance(place, Address)]
        self._files = [AddressFile(place) for place in places if isinstance(place, ListFile)]
        self._services = [ServiceWatch(place, on_change) for place in places if isinstance(place, ServicePort)]
        self._last: dict[Address, frozenset[str]] = {}
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Raises:
        ConfigError: a Service is listed, and no cluster or no client for it is there.
        """
        for each in self._services:
            await each.connect()
        self._watching = [asyncio.create_task(each.run(), name="service-watch") for each in self._services]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for each in self._services:
            await each.close()

    async def look_up(self) -> frozenset[str]:
        """All addresses of all places."""
        names = [*self._addresses, *(address for file in self._files for address in file.read())]
        found = await asyncio.gather(*(self._resolve(address) for address in dict.fromkeys(names)))
        return frozenset().union(*found, *(service.addresses for service in self._services))

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
