"""Checks JSON bodies with strict pydantic models, and turns the first mistake into an `InvalidRequest` with its field.

Unions are tagged by a function, so that an error is about the shape that the client meant. Knows no endpoint.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
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
from pydantic_core import ErrorDetails, PydanticCustomError

from baton.core.errors import InvalidRequest
from baton.gateway.http.unknown_fields import JsonBody, UnknownFields

_VALUE_CHARS_MAX = 100
_FIELD_CHARS_MAX = 200
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

# Prefix of union tags in pydantic's locations, so that they can be left out of field names.
_TAG = "~"
_UNSUPPORTED = "unsupported"
_UNKNOWN = "unknown"
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
        nearest = _nearest(unknown[:_VALUE_CHARS_MAX], known, _inner_fields(cls))
        context = {"name": unknown, "value": short(value[unknown]), "nearest": nearest}
        raise PydanticCustomError(_UNKNOWN, "it is not a parameter of this endpoint", context)


def _without_unknown(
    model: type[BaseModel], value: dict[str, Any], known: Collection[str], unknown: UnknownFields
) -> dict[str, Any]:
    inner = _inner_fields(model)
    for name, given in value.items():
        if name not in known and given is not None:
            meant = "" if unknown.full else _nearest(name[:_VALUE_CHARS_MAX], known, inner)
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
    return PydanticTag(_TAG + name)


def by_type(default: str | None = None, *, family: Callable[[str], str] = str) -> Discriminator:
    """Chooses an object's shape by its `type`; an object without one, or with null, has the shape `default`.

    Args:
        family: returns the tag of a type, where several types have one shape.
    """

    def choose(value: object) -> str | None:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        found = default if found is None else found
        return _TAG + family(found) if isinstance(found, str) else None

    return Discriminator(choose)


def by_shape(choose: Callable[[object], str | None], allowed: str) -> Discriminator:
    """Chooses the shape whose tag `choose` returns for a value. If it returns None, the value has no allowed shape."""

    def tagged(value: object) -> str | None:
        found = choose(value)
        return None if found is None else _TAG + found

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
        raise PydanticCustomError(_UNSUPPORTED, "{cure}", {"cure": cure})

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


def invalid_request(error: ValidationError) -> InvalidRequest:
    # There are only a few errors, because lists fail at the first wrong element and models at the first unknown field.
    return _describe(error.errors(include_url=False)[0])


def field_name(location: Iterable[str | int]) -> str:
    """Formats a pydantic location: `("input", "~items", 2, "content")` becomes `input[2].content`."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(_TAG) and part != "[key]":
            name += f".{part}" if name else part
    return name if len(name) <= _FIELD_CHARS_MAX else f"{name[:_FIELD_CHARS_MAX]}..."


def _describe(detail: ErrorDetails) -> InvalidRequest:
    field = field_name(detail["loc"])
    kind, context, value = detail["type"], detail.get("ctx", {}), short(detail["input"])
    describe = _DESCRIPTIONS.get(kind)
    if describe is not None:
        return describe(field, value, context)
    wanted = _WANTED.get(kind)
    allowed = wanted.format(**context) if wanted else detail["msg"]
    if kind == "int_type" and isinstance(detail["input"], float) and abs(detail["input"]) >= 2**63:
        allowed = "an integer of at most 64 bits"  # the parser of JSON makes larger ones floats
    return InvalidRequest(f"{field or 'the body'} is {value}", field=field, value=value, allowed=(allowed,))


def short(value: object) -> str:
    """Describes a value for an error message, briefly and without walking through nested JSON."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if not isinstance(value, str | int | float | bool | None):
        return type(value).__name__
    text = "null" if value is None else repr(value[:_VALUE_CHARS_MAX] if isinstance(value, str) else value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[:_VALUE_CHARS_MAX]}..."


def _missing(field: str, _value: str, _context: dict[str, Any]) -> InvalidRequest:
    return InvalidRequest(f"{field} is missing", field=field, cure=f"add {field}")


def _unknown(field: str, _value: str, context: dict[str, Any]) -> InvalidRequest:
    field = field_name((field, context["name"]) if field else (context["name"],))
    cure = f"did you mean {context['nearest']}?" if context["nearest"] else "leave it out; /docs lists all fields"
    message = f"{field} is not a parameter of this endpoint"
    return InvalidRequest(message, field=field, value=context["value"], cure=cure)


def _of_models(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    """Converts an error of a model's own validator, which checks several fields and names the wrong one first."""
    return InvalidRequest(str(context["error"]), field=field or str(context["error"]).split()[0], value=value)


def _too_long(field: str, _value: str, context: dict[str, Any]) -> InvalidRequest:
    count, most = context.get("actual_length") or "too many", context["max_length"]
    return InvalidRequest(f"{field} has {count} items", field=field, value=count, allowed=(f"up to {most}",))


def _too_short(field: str, _value: str, context: dict[str, Any]) -> InvalidRequest:
    count, least = context["actual_length"], context["min_length"]
    return InvalidRequest(f"{field} has {count} items", field=field, value=count, allowed=(f"{least} or more",))


def _not_offered(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    return InvalidRequest(f"{field} is {value}, which is not supported", field=field, value=value, cure=context["cure"])


def _literal(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    allowed = tuple(context["expected"].replace(" or ", ", ").split(", "))
    return InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=allowed)


def _unknown_type(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    field = f"{field}.type" if field else "type"
    value = short(context["tag"].removeprefix(_TAG))
    tags = [each.strip("'").removeprefix(_TAG) for each in context["expected_tags"].split(", ")]
    allowed = tuple(repr(name) for each in tags for name in each.split("|") if name)
    return InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=allowed)


def _no_type(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    """Converts the error for a value that is not an object or has no `type`."""
    if value == "an object":
        return _missing(f"{field}.type" if field else "type", value, context)
    return InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=("an object with a type",))


_DESCRIPTIONS: dict[str, Callable[[str, str, dict[str, Any]], InvalidRequest]] = {
    "missing": _missing,
    _UNKNOWN: _unknown,
    "value_error": _of_models,
    "too_long": _too_long,
    "too_short": _too_short,
    _UNSUPPORTED: _not_offered,
    "literal_error": _literal,
    "union_tag_invalid": _unknown_type,
    "union_tag_not_found": _no_type,
}


# What pydantic expected, in our words.
_WANTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "none_required": "null",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} character(s)",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "a string that matches {pattern}",
}
