"""Checks JSON bodies with strict pydantic models. The first mistake becomes an error (`field_errors`).

Unions are tagged by a function, so that an error is about the shape that the client meant. Knows no endpoint.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic import Tag as PydanticTag
from pydantic_core import PydanticCustomError

from baton.gateway.http.field_errors import TAG, UNKNOWN, UNSUPPORTED, VALUE_CHARS_MAX, invalid_request, short
from baton.gateway.http.unknown_fields import JsonBody, UnknownFields

_ALIKE = 0.8  # least similarity, of 1: temprature and max_token are above it, foo and text below

# Fields of one API, and what others have in their place.
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "system": ("instructions",),
    "instructions": ("system",),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_tokens",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "response_format": ("text", "output_config"),
    "function": ("parameters",),
    "parameters": ("input_schema",),
    "input_schema": ("parameters",),
    "schema": ("json_schema",),
}

_KIND = "kind"

_KINDS: Mapping[str, tuple[type, str]] = {
    "text": (str, "a string"),
    "list": (list, "a list"),
    "object": (dict, "an object"),
}


class Model(BaseModel):
    """A JSON object without unknown fields, conversions between types, or NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _has_no_unknown_field(cls, value: object, info: ValidationInfo) -> object:
        """Refuses the first unknown field, or leaves all of them out if the validation's context collects them.

        Pydantic itself would describe each of them, and a body may have 500,000.
        """
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if value.keys() <= known:
            return value
        if isinstance(info.context, UnknownFields):
            return _without_unknown(cls, value, known, info.context)
        unknown = next(name for name in value if name not in known)
        # NOTE: short strings only, because pydantic converts every value of the context to text, however long.
        nearest = _nearest(unknown[:VALUE_CHARS_MAX], known, _inner_fields(cls))
        context = {"name": unknown, "value": short(value[unknown]), "nearest": nearest}
        raise PydanticCustomError(UNKNOWN, "it is not a parameter of this endpoint", context)


def _without_unknown(
    model: type[BaseModel], value: dict[str, Any], known: Collection[str], unknown: UnknownFields
) -> dict[str, Any]:
    inner = _inner_fields(model)
    for name, given in value.items():
        if name not in known and given is not None:
            meant = "" if unknown.full else _nearest(name[:VALUE_CHARS_MAX], known, inner)
            unknown.add(value, name, meant)
    return {name: given for name, given in value.items() if name in known}


def _nearest(name: str, known: Collection[str], inner: Mapping[str, str]) -> str:
    """The field that was probably meant: here, or in an object below, such as `baton.session_id`; empty: no idea."""
    if name in inner:
        return inner[name]
    if elsewhere := [field for field in _ELSEWHERE.get(name, ()) if field in known]:
        return elsewhere[0]
    here = get_close_matches(name, known, n=1, cutoff=_ALIKE)
    below = get_close_matches(name, inner, n=1, cutoff=_ALIKE)
    return here[0] if here else inner[below[0]] if below else ""


def _inner_fields(model: type[BaseModel]) -> dict[str, str]:
    """The fields of the objects that are this model's fields, with the names of both: `baton.receipt`, which may also
    have been written as `receipt` or `baton_receipt`.
    """
    return {
        written: f"{outer}.{inner}"
        for outer, field in model.model_fields.items()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, Model)
        for inner in kind.model_fields
        for written in (inner, f"{outer}_{inner}")
    }


T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

Items = Annotated[list[T], Field(fail_fast=True)]
U32 = Annotated[int, Field(ge=0, le=2**32 - 1)]


def at_most(most: int) -> BeforeValidator:
    """Limits the number of an object's keys, before pydantic describes each wrong one."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", "too many", {"max_length": most, "actual_length": len(value)})
        return value

    return BeforeValidator(check)


PositiveU32 = Annotated[int, Field(ge=1, le=2**32 - 1)]


def tag(name: str) -> PydanticTag:
    """Marks one shape of a union. `name` is what the union's discriminator returns for that shape.

    Errors list the names as allowed: several of one shape are separated by `|`, and `|` alone lists none.
    """
    return PydanticTag(TAG + name)


def by_type(default: str | None = None, *, family: Callable[[str], str] = str) -> Discriminator:
    """Chooses an object's shape by its `type`; an object without one, or with null, has the shape `default`.

    Args:
        family: returns the tag of a type, where several types have one shape.
    """

    def choose(value: object) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        found = default if found is None else found
        return TAG + family(found) if isinstance(found, str) else None

    return Discriminator(choose)


def by_shape(choose: Callable[[object], str | None], allowed: str) -> Discriminator:
    """Chooses the shape whose tag `choose` returns for a value. If it returns None, the value has no allowed shape."""

    def tagged(value: object) -> str | None:
        found = choose(value)
        return None if found is None else TAG + found

    return Discriminator(tagged, custom_error_type=_KIND, custom_error_message=allowed)


def by_kind(*kinds: str) -> Discriminator:
    """Chooses the shape by the value's JSON type: `text`, `list` or `object`."""

    def choose(value: object) -> str | None:
        return next((kind for kind in kinds if isinstance(value, _KINDS[kind][0])), None)

    return by_shape(choose, " or ".join(_KINDS[kind][1] for kind in kinds))


TEXT_OR_LIST = by_kind("text", "list")
TEXT_OR_OBJECT = by_kind("text", "object")

StopText = Annotated[str, Field(min_length=1)]
Stops = Annotated[Annotated[StopText, tag("text")] | Annotated[Items[StopText], tag("list")], TEXT_OR_LIST]


def unsupported(cure: str, *harmless: object) -> BeforeValidator:
    """Refuses a known parameter that Baton does not support. Null and the `harmless` values pass, as None."""

    def check(value: object) -> None:
        if value is None or any(value is one or (type(value) is type(one) and value == one) for one in harmless):
            return
        raise PydanticCustomError(UNSUPPORTED, "{cure}", {"cure": cure})

    return BeforeValidator(check)


JsonObject = dict[str, Any]  # `parse_object` limits its depth


def checked(model: type[M], body: Mapping[str, Any]) -> M:
    """Validates a parsed body. Members of the body that are null count as absent.

    Args:
        body: a `JsonBody` may carry a collector of unknown fields; of any other body, unknown fields are refused.

    Raises:
        InvalidRequest: a field is wrong; the error names the first one as clients write it, such as
            `input[2].content[0].text`.
    """
    given = {name: value for name, value in body.items() if value is not None}
    unknown = body.unknown if isinstance(body, JsonBody) else None
    if unknown is not None:
        unknown.begin(given)
    try:
        return model.model_validate(given, context=unknown)
    except ValidationError as error:
        raise invalid_request(error) from None
