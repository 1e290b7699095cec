"""Internal values, which no flag and no variable of ours sets: they are measured, derived, constant, or unsafe to
change, or come from variables of other tools.

They are fields of the settings classes, so that a class holds all values of its process. Tests and benchmarks pass
other values to the class, or change a process's defaults before it starts.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

_MARK = "internal"


def internal(default: object, meaning: str, *, ge: int | None = None, le: int | None = None) -> Any:
    """Declares a field that is not a setting.

    Args:
        ge: least value, for fields that variables of other tools set.
        le: greatest value.
    """
    return Field(default, description=meaning, ge=ge, le=le, json_schema_extra={_MARK: True})


def is_internal(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and _MARK in info.json_schema_extra


def set_internal_defaults(values: Mapping[str, object], *classes: type[BaseModel]) -> None:
    """Changes defaults in this process, of each class that has the field; for tests and benchmarks."""
    for cls in classes:
        for name in values.keys() & cls.model_fields.keys():
            assert is_internal(cls.model_fields[name]), name
            cls.model_fields[name].default = values[name]
        cls.model_rebuild(force=True)


def settings_of(cls: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields that users set, by name."""
    return {name: info for name, info in cls.model_fields.items() if not is_internal(info)}
