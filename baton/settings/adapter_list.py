"""The adapters that a node's setting names, and their names. Pure."""

from pathlib import Path
from typing import NamedTuple

from baton.settings.config import listed

_NAME_MAX = 128


class AdapterList(NamedTuple):
    """What `adapter` says.

    Attributes:
        named: directories of the adapters to load at start, by name.
        watched: the directory whose adapters come and go.
    """

    named: dict[str, Path]
    watched: Path | None


def read_adapters(given: str) -> AdapterList:
    """Reads a list of `name=directory`. One entry may be a directory without a name.

    Raises:
        ValueError: a name is wrong, a directory is missing, or two have no name.
    """
    named: dict[str, Path] = {}
    watched = [each for each in listed(given) if "=" not in each]
    if len(watched) > 1:
        raise ValueError(f"{watched[1]!r} is a second directory without a name; only one is watched")
    for each in listed(given):
        name, found, directory = each.partition("=")
        if found and not (directory and is_adapter_name(name)):
            name_of = f"a name has up to {_NAME_MAX} printable characters"
            raise ValueError(f"{each!r} is neither name=directory nor a directory; {name_of}")
        if found:
            named[name] = Path(directory)
    return AdapterList(named, Path(watched[0]) if watched else None)


def is_adapter_name(name: str) -> bool:
    """Whether clients can use this name for a model."""
    return 0 < len(name) <= _NAME_MAX and name.isprintable() and not set(name) & set(" ,=")
