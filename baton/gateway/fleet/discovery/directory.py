"""The current addresses of one setting's places: each look-up resolves names and reads files; Services are watched.

A place that cannot be read keeps its last addresses. If all places together list more than `ADDRESSES_MAX`, all keep
their last addresses.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from baton.core.errors import ConfigError
from baton.core.regular_file import read_regular_file
from baton.gateway.fleet.discovery.cluster import ServiceWatch
from baton.gateway.fleet.discovery.sources import ADDRESSES_MAX, ListFile, Place, ServicePort
from baton.rpc.server import ListenAddress

_BYTES_MAX = 1 << 20
log = logging.getLogger("baton")

_RESOLVE_AT_ONCE = 16
_RESOLVE_S = 2.0  # time for which a look-up waits for names


class Directory:
    """The addresses of one role's nodes. An async context manager: inside it, Services are watched.

    Args:
        on_change: called when a watched Service has changed or a slow name has been resolved; look up again then.
    """

    def __init__(self, places: Sequence[Place], on_change: Callable[[], None] = lambda: None) -> None:
        self._addresses = [place for place in places if isinstance(place, ListenAddress)]
        self._files = [AddressFile(place) for place in places if isinstance(place, ListFile)]
        self._services = [ServiceWatch(place, on_change) for place in places if isinstance(place, ServicePort)]
        self._on_change = on_change
        self._last: dict[ListenAddress, frozenset[str]] = {}  # last addresses of each name
        self._resolving: dict[ListenAddress, asyncio.Task[None]] = {}
        self._resolver_slots = asyncio.Semaphore(_RESOLVE_AT_ONCE)
        self._all: frozenset[str] = frozenset()
        self._too_many = False
        self._watching: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Begins to watch the Services.

        Raises:
            ConfigError: a Service is listed, but no cluster is configured or the client package is not installed.
        """
        for each in self._services:
            await each.connect()
        self._watching = [asyncio.create_task(each.run(), name="service-watch") for each in self._services]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = [*self._watching, *self._resolving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self._services:
            await each.close()

    async def look_up(self) -> frozenset[str]:
        """All addresses of all places. Names that take longer than `_RESOLVE_S` contribute their last addresses."""
        listed = dict.fromkeys([*self._addresses, *(address for file in self._files for address in file.read())])
        literal = {address for address in listed if _is_literal(address.host)}
        await self._resolve([address for address in listed if address not in literal])
        found = frozenset(f"{address.host}:{address.port}" for address in literal).union(
            *(self._last.get(address, frozenset()) for address in listed if address not in literal),
            *(service.addresses for service in self._services),
        )
        too_many = len(found) > ADDRESSES_MAX
        if too_many and not self._too_many:
            log.warning(
                "%d addresses are listed, but at most %d are allowed: the last %d stay",
                len(found), ADDRESSES_MAX, len(self._all),
            )  # fmt: skip
        self._too_many = too_many
        self._all = self._all if too_many else found
        return self._all

    async def _resolve(self, names: Sequence[ListenAddress]) -> None:
        """Resolves the names and waits at most `_RESOLVE_S`; slower look-ups continue in the background."""
        for gone in self._last.keys() - names:
            del self._last[gone]
        tasks = []
        for address in names:
            if (task := self._resolving.get(address)) is None:
                task = asyncio.create_task(self._resolve_one(address), name=f"resolve {address.host}")
                self._resolving[address] = task
            tasks.append(task)
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=_RESOLVE_S)
        for task in late:
            task.add_done_callback(lambda _: self._on_change())

    async def _resolve_one(self, address: ListenAddress) -> None:
        try:
            async with self._resolver_slots:
                self._last[address] = await _addresses_of(address)
        except OSError as error:
            if address not in self._last:
                log.warning("cannot resolve %s: %s", address.host, error.strerror)
                self._last[address] = frozenset()
        finally:
            del self._resolving[address]


async def _addresses_of(name: ListenAddress) -> frozenset[str]:
    """Resolves a name, in a separate thread, to addresses with its port.

    Raises:
        OSError: the name has no address.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Any] | OSError] = loop.create_future()

    def take(found: list[Any] | OSError) -> None:
        if not answer.done():
            answer.set_result(found)

    def ask() -> None:
        found: list[Any] | OSError
        try:
            found = socket.getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
        except OSError as error:
            found = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(take, found)

    # NOTE: not in a thread pool: a process waits for pool threads when it exits, and a resolver may take minutes.
    threading.Thread(target=ask, name=f"resolve {name.host}", daemon=True).start()
    answers = await answer
    if isinstance(answers, OSError):
        raise answers
    # NOTE: only one family, because a node with addresses of both families must not count twice.
    families = {family for family, *_ in answers}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = {str(where[0]) for its_family, _, _, _, where in answers if its_family == family}
    return frozenset(f"[{host}]:{name.port}" if ":" in host else f"{host}:{name.port}" for host in hosts)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


class AddressFile:
    """The addresses in a file. An unreadable or malformed file keeps its last addresses and is logged once."""

    def __init__(self, place: ListFile) -> None:
        self._path = place.path
        self._seen: tuple[int, ...] | str = ()
        self._last: tuple[ListenAddress, ...] = ()

    def read(self) -> tuple[ListenAddress, ...]:
        """Reads the file if it has changed; returns its addresses."""
        try:
            self._read_if_changed()
        except (OSError, ConfigError, UnicodeDecodeError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            if self._seen != why:
                log.warning("%s is not read, and its last %d addresses stay: %s", self._path, len(self._last), why)
            self._seen = why
        return self._last

    def _read_if_changed(self) -> None:
        # NOTE: Kubernetes changes a mounted file by changing a link to its folder, so the inode counts too.
        found = os.stat(self._path)
        stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
        if stamp != self._seen:
            text = read_regular_file(self._path, bytes_max=_BYTES_MAX).decode()
            lines = (line.partition("#")[0] for line in text.splitlines())
            parts = [part.strip() for line in lines for part in line.split(",")]
            listed = [part for part in parts if part]
            if len(listed) > ADDRESSES_MAX:
                raise ConfigError(f"it lists {len(listed)} addresses", allowed=(f"at most {ADDRESSES_MAX}",))
            self._last = tuple(ListenAddress.parse(part, field=str(self._path)) for part in listed)
            self._seen = stamp
