"""`Fields`: the pydantic base of every class that declares fields of a checkpoint's JSON files.

Types are strict. A wrong value is a `ConfigError` whose allowed values come from the field's type.
"""

from collections.abc import Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, PrivateAttr, ValidationError

from baton.core.errors import ConfigError
from baton.models.config.file import ConfigFile

# The limits are far above any model's numbers. Beyond them a loop would not end, an allocation would fail, or bytes
# would overflow.
_INT32_MAX = 2**31 - 1
CONTEXT_MAX = _INT32_MAX  # tokens
Count: TypeAlias = Annotated[int, Ge(1), Le(_INT32_MAX)]
SequenceTokens: TypeAlias = Annotated[int, Ge(2), Le(_INT32_MAX)]  # room for at least one prompt and one output token
CountOrZero: TypeAlias = Annotated[int, Ge(0), Le(_INT32_MAX)]
Size: TypeAlias = Annotated[int, Ge(1), Le(2**20 - 1)]  # of one axis of a weight
Heads: TypeAlias = Annotated[int, Ge(1), Le(2**14)]  # or experts: each is an axis of a weight with two others
Layers: TypeAlias = Annotated[int, Ge(1), Le(2**12)]
LayersOrZero: TypeAlias = Annotated[int, Ge(0), Le(2**12)]
_FLOAT_MAX = 1e30  # the product of two such numbers overflows float32
Positive: TypeAlias = Annotated[float, Gt(0), Le(_FLOAT_MAX)]
AtLeastZero: TypeAlias = Annotated[float, Ge(0), Le(_FLOAT_MAX)]
Fraction: TypeAlias = Annotated[float, Gt(0), Le(1)]
Table: TypeAlias = dict[str, object]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _one_as_tuple(value: object) -> object:
    """Makes a tuple of a single number, which publishers write without a list."""
    return (value,) if isinstance(value, int) else _as_tuple(value)


Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Numbers: TypeAlias = Annotated[tuple[Positive, ...], BeforeValidator(_as_tuple)]
Integers: TypeAlias = Annotated[tuple[CountOrZero, ...], BeforeValidator(_one_as_tuple)]


class Cure(str):
    """Metadata of a field: the cure that ends the error for a wrong value."""


class Fields(BaseModel):
    """The fields of one JSON object. Other fields in the object are ignored unless a class forbids them.

    A null counts as absent, except in fields whose type allows None.

    Attributes:
        unmentioned: values of fields that the file does not mention. A null in the file overrides them, as in
            transformers.
        cure: the cure in errors for fields without a `Cure` of their own.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)
    unmentioned: ClassVar[Mapping[str, object]] = MappingProxyType({})
    cure: ClassVar[str] = ""
    _file: ConfigFile = PrivateAttr()

    @classmethod
    def read(cls, file: ConfigFile) -> Self:
        """Reads the fields of `file`.

        Raises:
            ConfigError: a field is missing, wrong or forbidden.
        """
        given = {**cls.unmentioned, **file.values}
        try:
            fields = cls.model_validate(
                {name: value for name, value in given.items() if value is not None or cls._takes_null(name)}
            )
        except ValidationError as error:
            loc = error.errors(include_url=False, include_input=False)[0]["loc"]
            name = str(loc[0]) if loc else next(filter(_has_surrogates, given))
            raise cls.refuse_value(ConfigFile(file.where, given), name) from None
        fields._file = ConfigFile(file.where, given)
        return fields

    def refuse(self, name: str, *allowed: str, cure: str = "") -> ConfigError:
        """Returns the error for a value that its type allows."""
        return self._file.refuse(name, *allowed, cure=cure)

    def table(self, name: str) -> ConfigFile:
        """Returns a nested object, or an empty one if it is null or absent."""
        return self._file.table(name)

    @classmethod
    def _takes_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and NoneType in get_args(field.annotation)

    @classmethod
    def refuse_value(cls, file: ConfigFile, name: str) -> ConfigError:
        """Returns the error for a value that its type does not allow."""
        field = cls.model_fields.get(name)
        if field is None:
            return file.refuse(name, "null", cure=cls.cure or f"known fields are {', '.join(cls.model_fields)}")
        cure = next((item for item in field.metadata if isinstance(item, Cure)), cls.cure)
        return file.refuse(name, *_allowed(field.annotation, field.metadata), cure=cure)


def _has_surrogates(name: str) -> bool:
    """Whether the name has half of a surrogate pair, which JSON can write but is not text."""
    return any("\ud800" <= character <= "\udfff" for character in name)


def _allowed(annotation: Any, metadata: list[Any]) -> tuple[str, ...]:
    """Describes the values of a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _allowed(arguments[0], list(arguments[1:]))
    if origin in (Union, UnionType):
        return tuple(text for each in arguments if each is not NoneType for text in _allowed(each, []))
    if origin is Literal:
        return tuple(str(value).lower() if isinstance(value, bool) else str(value) for value in arguments)
    least = next((item.ge for item in metadata if isinstance(item, Ge)), None)
    most = next((item.le for item in metadata if isinstance(item, Le)), None)
    if annotation is int:
        return ("an integer",) if least is None else (f"an integer from {least} to {most}",)
    if annotation is float:
        upper = "" if most is None else f" and up to {most:g}"
        if any(isinstance(item, Gt) for item in metadata):
            return (f"a number above 0{upper}",)
        return ("a number",) if least is None else (f"a number of at least {least:g}{upper}",)
    words: Mapping[Any, tuple[str, ...]] = {
        NoneType: ("null",),
        bool: ("true", "false"),
        str: ("a string",),
        tuple[str, ...]: ("a list of strings",),
        tuple[Positive, ...]: ("a list of numbers above 0",),
        tuple[CountOrZero, ...]: ("an integer", "a list of integers"),
        list[int]: ("a list of integers",),
        Table: ("an object",),
    }
    return words[annotation]
