"""Parts that other distributions register by entry points: attention backends, model families, transports.

An entry point's name is the part's name. A name that Baton's own table has, or that two distributions register, is an
error. A plug-in is imported only when it is looked up.
"""

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from baton.core.errors import ConfigError

ATTENTION_BACKENDS = "baton.attention_backends"
MODEL_FAMILIES = "baton.model_families"
TRANSPORTS = "baton.transports"
GROUPS = (ATTENTION_BACKENDS, MODEL_FAMILIES, TRANSPORTS)

T = TypeVar("T")


def plugin_names(group: str, ours: Collection[str]) -> tuple[str, ...]:
    """Names that installed plug-ins add to `ours`, sorted.

    Raises:
        ConfigError: two distributions register one name, or one registers a name of ours.
    """
    return tuple(sorted(_entries(group, ours)))


def find_registered(group: str, name: str, table: Mapping[str, T], kind: type[T]) -> T | None:
    """The part of that name, from our table or from a plug-in; None if there is none.

    Raises:
        ConfigError: the name is registered twice, or the plug-in cannot be loaded or is of another class.
    """
    entry = _entries(group, table).get(name)
    if entry is None:
        return table.get(name)
    part = load(entry)
    if not isinstance(part, kind):
        raise _broken(entry, f"it is of class {type(part).__name__}, not {kind.__name__}")
    return part


def load_plugins(group: str, ours: Collection[str]) -> dict[str, object]:
    """Every plug-in of a group by name, sorted.

    Raises:
        ConfigError: a name is registered twice, or a plug-in cannot be loaded.
    """
    return {name: load(entry) for name, entry in sorted(_entries(group, ours).items())}


def load(entry: EntryPoint) -> object:
    """Imports what an entry point names.

    Raises:
        ConfigError: the import fails; names the distribution.
    """
    try:
        return entry.load()
    except Exception as error:  # a plug-in's module may raise anything
        raise _broken(entry, f"{type(error).__name__}: {error}") from error


def _entries(group: str, ours: Collection[str]) -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in _installed(group, tuple(_folders())):
        if entry.name in ours:
            raise _clash(entry, "Baton has it already")
        if entry.name in found:
            raise _clash(entry, f"{_origin(found[entry.name])} registers it too")
        found[entry.name] = entry
    return found


@lru_cache(maxsize=2 * len(GROUPS))
def _installed(group: str, _changed: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """The entry points of a group, searched again once a folder has changed. Among 170 distributions a search takes
    7 ms, and a node's start asks seven times."""
    return tuple(entry_points(group=group))


def _folders() -> Iterator[tuple[str, int]]:
    """Folders in which Python finds distributions, and when each last got or lost one."""
    for folder in sys.path:
        with suppress(OSError):
            yield folder, os.stat(folder or os.curdir).st_mtime_ns


def _clash(entry: EntryPoint, why: str) -> ConfigError:
    message = f"{_origin(entry)} registers {entry.name!r} in {entry.group}, and {why}"
    cure = f"rename it there, or `pip uninstall {_distribution(entry)}`"
    return ConfigError(message, field=entry.group, value=entry.name, cure=cure)


def _broken(entry: EntryPoint, why: str) -> ConfigError:
    message = f"{_origin(entry)} registers {entry.value!r} as {entry.name!r} in {entry.group}, and {why}"
    cure = f"install a version of it for this Baton, or `pip uninstall {_distribution(entry)}`"
    return ConfigError(message, field=entry.group, value=entry.name, cure=cure)


def _origin(entry: EntryPoint) -> str:
    return f"{_distribution(entry)} {entry.dist.version}" if entry.dist is not None else _distribution(entry)


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "a distribution without a name"
