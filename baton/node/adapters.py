"""Loads and unloads a node's adapters: at start, by RPC, and as they appear in and disappear from a watched directory.

Files are read and checked in a thread, so no step waits for them. If an adapter cannot be loaded at start, the process
exits; in the directory, this is logged once, and retried when the adapter's files change or a slot is free.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from baton.core.errors import BatonError, ConfigError, InvalidRequest, Overloaded, UnknownModel
from baton.core.types import AdapterRef
from baton.engine.engine import Engine
from baton.models.adapters.adapter import WEIGHTS_FILE, has_experts, read_adapter
from baton.models.adapters.bank import AdapterBank
from baton.models.adapters.config import CONFIG_FILE
from baton.settings.adapter_list import is_adapter_name
from baton.settings.node_config import NodeSettings

log = logging.getLogger("baton")

WATCH_S = 1.0
# Modification time and size of each file of a directory, which differ once the files have changed.
_Stamp = tuple[tuple[int, int], ...]


class Adapters:
    """The adapters of one node. Used on the event loop while the engine runs.

    Args:
        bank: the slots on rank 0; None: the node accepts no adapters.
        model_name: of the base model.
    """

    def __init__(self, settings: NodeSettings, engine: Engine, bank: AdapterBank | None, *, model_name: str) -> None:
        self._settings = settings
        self._engine = engine
        self._bank = bank
        self._model_name = model_name
        self._loading = asyncio.Lock()
        # In the watched directory, by name: the adapters found, those tried, and those that wait for a slot.
        self._there: Mapping[str, _Stamp] = {}
        self._tried: dict[str, _Stamp] = {}
        self._waiting: set[str] = set()

    async def load(self, name: str, directory: Path) -> AdapterRef:
        """Loads an adapter from a directory under a name.

        Raises:
            InvalidRequest: the name is wrong, the directory has no adapter for this model, or the node accepts none.
            Overloaded: no slot is free.
        """
        if self._bank is None:
            cure = "start the node with --max-adapters"
            raise InvalidRequest("this node does not serve adapters", field="max_adapters", value=0, cure=cure)
        if not is_adapter_name(name):
            allowed = ("printable characters without space, comma and =",)
            raise InvalidRequest(f"an adapter cannot be named {name!r}", field="name", value=name, allowed=allowed)
        if name == self._model_name:
            what = f"the adapter {name} has the model's name, which clients use for the model itself"
            raise InvalidRequest(what, field="name", value=name, cure="give it another name")
        async with self._loading:
            try:
                adapter = await asyncio.to_thread(
                    read_adapter, directory, self._bank.layers, max_rank=self._settings.max_adapter_rank
                )
            except ConfigError as error:
                raise InvalidRequest(
                    error.message, field=error.field, value=error.value, allowed=error.allowed, cure=error.cure
                ) from error
            loaded = await self._engine.load_adapter(name, adapter)
        log.info("adapter %s: loaded, rank %d, revision %s", name, adapter.rank, loaded.revision)
        return loaded

    def unload(self, name: str) -> None:
        """Unloads an adapter.

        Raises:
            UnknownModel: it is not loaded.
        """
        known = tuple(each.name for each in self._engine.adapters.loaded)
        if not self._engine.adapters.unload(name):
            raise UnknownModel(f"no adapter {name!r} is loaded", field="name", value=name, allowed=known)
        log.info("adapter %s: unloaded", name)

    async def start(self) -> None:
        """Loads the adapters that the settings name and those in the directory.

        Raises:
            ConfigError: an adapter of the settings cannot be loaded, or the directory does not exist.
        """
        for name, directory in self._settings.adapters.items():
            try:
                await self.load(name, directory)
            except (InvalidRequest, Overloaded) as error:
                raise ConfigError(
                    error.message,
                    field="adapter",
                    value=f"{name}={directory}",
                    allowed=error.allowed,
                    cure=error.cure,
                ) from error
        if (watched := self._settings.watched_adapters) is not None:
            if not watched.is_dir():
                what, allowed = f"adapter names {watched}, which is not a directory", ("name=directory", "a directory")
                raise ConfigError(what, field="adapter", value=str(watched), allowed=allowed, cure="create it")
            self._there = await asyncio.to_thread(_stamps, watched)
            await self.scan(watched)

    async def watch(self) -> None:
        """Follows the directory until cancelled; returns at once if there is no directory."""
        directory = self._settings.watched_adapters
        while directory is not None:
            await asyncio.sleep(WATCH_S)
            await self.scan(directory)

    async def scan(self, directory: Path) -> None:
        """Loads new and changed adapters, and unloads those whose directory is gone.

        An adapter is loaded once two scans have found the same files, because half-written files could be read as
        another adapter.
        """
        found, before = await asyncio.to_thread(_stamps, directory), self._there
        self._there = found
        for name in self._tried.keys() - found.keys():
            del self._tried[name]
            self._waiting.discard(name)
            if self._engine.adapters.unload(name):
                log.info("adapter %s: unloaded, its directory is gone", name)
        for name, stamp in found.items():
            untried = self._tried.get(name) != stamp or (name in self._waiting and not self._engine.adapters.full)
            if untried and before.get(name) == stamp:
                self._tried[name] = stamp
                await self._try(name, directory / name)

    async def _try(self, name: str, directory: Path) -> None:
        try:
            await self.load(name, directory)
        except Overloaded as error:  # tried again at each scan
            if name not in self._waiting:
                log.warning("adapter %s waits for a slot: %s", name, error)
            self._waiting.add(name)
            return
        except BatonError as error:
            log.warning("adapter %s is not loaded: %s", name, error)
        self._waiting.discard(name)


def need_room_for_experts(settings: NodeSettings) -> bool:
    """Whether one of the adapters that the node finds when it starts changes routed experts."""
    watched = settings.watched_adapters
    there = [] if watched is None else [watched / name for name in _stamps(watched)]
    return any(has_experts(directory) for directory in (*settings.adapters.values(), *there))


def _stamps(directory: Path) -> Mapping[str, _Stamp]:
    """The adapters in the directory, by name. Hidden ones are left out: programs write them before they rename them."""
    found: dict[str, _Stamp] = {}
    try:
        inside = sorted(directory.iterdir())
    except OSError as error:
        log.warning("cannot read %s: %s", directory, error.strerror)
        return found
    for each in inside:
        if each.name.startswith("."):
            continue
        try:
            status = [(each / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
        except OSError:
            continue  # no adapter, or one that is not complete yet
        found[each.name] = tuple((file.st_mtime_ns, file.st_size) for file in status)
    return found
