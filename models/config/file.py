"""A checkpoint's JSON files, read field by field; every failure is one line that names file, field and what is allowed.

Knows no family and no meaning of any field.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from baton.errors import ConfigError

T = TypeVar("T")


class ConfigFile:
    """A JSON object. A field that is null counts as absent; only `mentions` tells the two apart."""

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self.where = where
        self._mentioned = frozenset(values)
        self._values = {name: value for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, path: Path) -> "ConfigFile":
        """Reads `path`.

        Raises:
            ConfigError: it cannot be read, is not JSON, or is not an object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}",
                field="model",
                value=str(path),
                cure="give the directory of a checkpoint in Hugging Face format",
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{path} is not JSON: {error}", field="model", value=str(path), cure="download the file again"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} is not a JSON object", field="model", value=str(path), cure="download the file again"
            )
        return cls(str(path), values)

    def with_defaults(self, defaults: Mapping[str, object]) -> "ConfigFile":
        """The same file, with `defaults` for the fields that it does not mention; what it says to be null stays so."""
        given = dict.fromkeys(self._mentioned) | self._values
        return ConfigFile(self.where, {**defaults, **given})

    def with_values(self, values: Mapping[str, object]) -> "ConfigFile":
        """The same file, with `values` whatever it says of those fields."""
        given = dict.fromkeys(self._mentioned) | self._values
        return ConfigFile(self.where, {**given, **values})

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def mentions(self, name: str) -> bool:
        """Whether the file has the field, null or not."""
        return name in self._mentioned

    def names(self) -> frozenset[str]:
        return frozenset(self._values)

    def raw(self, name: str) -> object:
        """The value as it stands; None when absent."""
        return self._values.get(name)

    def refuse(self, name: str, *allowed: str, cure: str = "") -> ConfigError:
        """The error to raise for the value of `name`."""
        value = self._values.get(name, "missing")
        return ConfigError(
            f"{self.where}: {name} is {value if name not in self else repr(value)}",
            field=name,
            value=value,
            allowed=allowed,
            cure=cure,
        )

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least `minimum`; `default` when absent, or an error when there is no default."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refuse(name, f"an integer of at least {minimum}")
        return value

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        return self.integer(name, minimum=minimum) if name in self else None

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` when absent, or an error when there is no default."""
        value = self.number(name, default)
        if value <= 0:
            raise self.refuse(name, "a number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refuse(name, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true", "false")
        return value

    def choice(self, name: str, allowed: Mapping[str, T], default: str) -> T:
        """What `allowed` gives for the text of `name`."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(name, *allowed)
        return allowed[value]

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """An integer or a list of integers, none below 0; empty when absent."""
        value = self._values.get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self.refuse(name, "an integer", "a list of integers")
        return tuple(items)

    def table(self, name: str) -> "ConfigFile":
        """A nested object; an empty one when absent."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return ConfigFile(f"{self.where}: {name}", value)
