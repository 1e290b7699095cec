"""Reads a checkpoint's JSON files as raw values, and makes one-line errors that name file, field and allowed values."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr

from baton.core.errors import ConfigError
from baton.core.regular_file import read_regular_file

_FILE_BYTES_MAX = 256 << 20  # the largest published index has 20 MB
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxlevel = 3


@dataclass(frozen=True)
class ConfigFile:
    """A JSON file's object, or an object nested in it.

    Attributes:
        where: the path, and for a nested object its field.
    """

    where: str
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Reads `path`.

        Raises:
            ConfigError: the file cannot be read, is not JSON, or is not an object.
        """
        try:
            values = json.loads(read_regular(path))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path} is not JSON: {error}", field="model", value=str(path), cure="download the file again"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} is not a JSON object", field="model", value=str(path), cure="download the file again"
            )
        return cls(str(path), values)

    def raw(self, name: str) -> object:
        """Returns the unchecked value; None if absent."""
        return self.values.get(name)

    def table(self, name: str) -> "ConfigFile":
        """Returns a nested object, or an empty one if it is null or absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return ConfigFile(f"{self.where}: {name}", value or {})

    def with_values(self, values: Mapping[str, object]) -> "ConfigFile":
        """Returns the same file with `values` instead of its own."""
        return ConfigFile(self.where, {**self.values, **values})

    def refuse(self, name: str, *allowed: str, cure: str = "") -> ConfigError:
        """Returns the error for the value of `name`."""
        value = self.raw(name)
        return ConfigError(
            f"{self.where}: {name} is {'missing' if value is None else shown(value)}",
            field=name,
            value="missing" if value is None else value if isinstance(value, str | int | float) else shown(value),
            allowed=allowed,
            cure=cure,
        )


def read_regular(path: Path) -> bytes:
    """Reads a checkpoint's file. It does not block on a pipe or device.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, or is too large.
    """
    try:
        return read_regular_file(path, bytes_max=_FILE_BYTES_MAX)
    except OSError as error:
        problem = error.strerror or str(error)
    cure = "give the directory of a checkpoint in Hugging Face format"
    raise ConfigError(f"cannot read {path}: {problem}", field="model", value=str(path), cure=cure)


def shown(value: object) -> str:
    """Formats a file's value for an error; the text is short however long or deep the value is."""
    return _SHOWN.repr(value)
