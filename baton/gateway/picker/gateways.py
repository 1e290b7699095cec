"""Finds the gateways, and polls the load and readiness of each from its metrics."""

import asyncio
import logging
import re
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Self

from baton.core.errors import ConfigError
from baton.gateway.fleet.connect_pace import ConnectPace
from baton.gateway.fleet.discovery.directory import Directory
from baton.gateway.fleet.discovery.sources import FORMS, parse_places
from baton.gateway.picker.choice import GatewayChoice, Report
from baton.rpc.server import ListenAddress
from baton.settings.gateway_config import PickerSettings

log = logging.getLogger("baton")

_PAGE_BYTES_MAX = 4 << 20
_NAMES = ("baton_ready", "baton_num_requests_running", "baton_num_requests_waiting")
_PATH = "/metrics?" + "&".join(f"name%5B%5D={name}" for name in _NAMES)
_METRIC = re.compile(rf"^({'|'.join(_NAMES)})(?:\{{.*\}})? (\S+)$".encode(), re.MULTILINE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,9}) *\r\n", re.IGNORECASE)


class GatewayPool:
    """Keeps a `GatewayChoice` up to date during the `async with` block.

    Attributes:
        upkeep: the task that does so; it ends only if it fails.
    """

    def __init__(self, settings: PickerSettings, choice: GatewayChoice) -> None:
        """Parses the setting `pool`.

        Raises:
            ConfigError: `pool` is empty or malformed.
        """
        self._settings = settings
        self._choice = choice
        self._changed = asyncio.Event()
        places = parse_places(settings.pool, field="pool")
        if not places:
            raise ConfigError("pool is empty", field="pool", value="", allowed=FORMS)
        self._directory = Directory(places, self._changed.set)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._silent: dict[str, str] = {}  # why a gateway does not answer, by address
        self._pace = ConnectPace()
        self._asked: set[str] = set()
        self._known = asyncio.Event()
        self.upkeep: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        await self._directory.__aenter__()
        self.upkeep = asyncio.create_task(self._keep_up(), name="gateways")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.upkeep.cancel()
        await asyncio.wait([self.upkeep])
        await self._directory.__aexit__(exc_type, exc, traceback)

    async def until_known(self) -> None:
        """Waits until gateways were found and each was polled once."""
        await self._known.wait()

    async def _keep_up(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                addresses = await self._directory.look_up()
                self._choice.set_addresses(addresses)
                for address in self._asking.keys() - addresses:
                    self._asking.pop(address).cancel()
                    self._silent.pop(address, None)
                    self._asked.discard(address)
                for address in sorted(addresses - self._asking.keys()):
                    self._asking[address] = tasks.create_task(self._follow(address), name=f"ask {address}")
                self._note_known()
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.resolve_s):
                        await self._changed.wait()
                self._changed.clear()

    async def _follow(self, address: str) -> None:
        answered = False
        while True:
            try:
                async with self._pace.turn(answered=answered), asyncio.timeout(self._settings.stale_s):
                    asked_s = monotonic()
                    page = await _get(self._metrics_address(address))
                answered = True
                self._choice.report(address, read_report(page, asked_s))
                self._note(address, None)
            except TimeoutError:
                self._note(address, f"no answer within {self._settings.stale_s:g} s")
            except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
                self._choice.lost(address)
                self._note(address, getattr(error, "strerror", None) or str(error))
            self._asked.add(address)
            self._note_known()
            self._pace.silent = len(self._silent)
            pause_s = self._settings.poll_s
            await asyncio.sleep(self._pace.pause_s(pause_s) if address in self._silent else pause_s)

    def _metrics_address(self, address: str) -> ListenAddress:
        found = ListenAddress.parse(address, field="pool")
        return ListenAddress(found.host.strip("[]"), self._settings.pool_metrics_port or found.port)

    def _note_known(self) -> None:
        if self._asking and self._asking.keys() <= self._asked:
            self._known.set()

    def _note(self, address: str, why: str | None) -> None:
        """Logs once when a gateway stops answering, and once when it answers again."""
        if why is None:
            if self._silent.pop(address, None) is not None:
                log.info("gateway %s answers again", address)
        elif address not in self._silent:
            self._silent[address] = why
            log.warning("gateway %s gets no requests: %s", address, why)


async def _get(address: ListenAddress) -> bytes:
    """Fetches the page of metrics.

    Raises:
        OSError, EOFError: nothing answers at the address.
        ValueError, asyncio.LimitOverrunError: the answer is not a page of metrics.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        host = f"[{address.host}]" if ":" in address.host else address.host
        writer.write(f"GET {_PATH} HTTP/1.1\r\nHost: {host}:{address.port}\r\nConnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        status = head.split(b" ", 2)[1:2]
        if status != [b"200"]:
            cure = "set BATON_POOL_METRICS_PORT to the port of its --metrics-listen"
            raise ValueError(f"its /metrics answers {b''.join(status).decode(errors='replace')[:3]!r}; {cure}")
        length = _LENGTH.search(head)
        if length is None or int(length[1]) > _PAGE_BYTES_MAX:
            raise ValueError("its /metrics has no valid content-length")
        return await reader.readexactly(int(length[1]))
    finally:
        writer.transport.abort()


def read_report(page: bytes, asked_s: float) -> Report:
    """Reads a gateway's load and readiness from its page of metrics. Older gateways have no metric of readiness.

    Raises:
        ValueError: the page is not a gateway's.
    """
    found = {name.decode(): float(value) for name, value in _METRIC.findall(page)}
    try:
        running, waiting = (found[f"baton_num_requests_{state}"] for state in ("running", "waiting"))
    except KeyError:
        raise ValueError("its /metrics is not a gateway's") from None
    return Report(asked_s, found.get("baton_ready", 1.0) > 0, max(0.0, running), max(0.0, waiting))
