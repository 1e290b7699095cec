"""Turns the first mistake that pydantic finds in a body into an `InvalidRequest` with the field's name. Pure."""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from baton.core.errors import InvalidRequest

VALUE_CHARS_MAX = 100
_FIELD_CHARS_MAX = 200

# Prefix of union tags in pydantic's locations, so that they can be left out of field names.
TAG = "~"
UNSUPPORTED = "unsupported"
UNKNOWN = "unknown"


def invalid_request(error: ValidationError) -> InvalidRequest:
    # There are only a few errors, because lists fail at the first wrong element and models at the first unknown field.
    return _describe(error.errors(include_url=False)[0])


def field_name(location: Iterable[str | int]) -> str:
    """Formats a pydantic location: `("input", "~items", 2, "content")` becomes `input[2].content`."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not part.startswith(TAG) and part != "[key]":
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
    text = "null" if value is None else repr(value[:VALUE_CHARS_MAX] if isinstance(value, str) else value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."


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
    value = short(context["tag"].removeprefix(TAG))
    tags = [each.strip("'").removeprefix(TAG) for each in context["expected_tags"].split(", ")]
    allowed = tuple(repr(name) for each in tags for name in each.split("|") if name)
    return InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=allowed)


def _no_type(field: str, value: str, context: dict[str, Any]) -> InvalidRequest:
    """Converts the error for a value that is not an object or has no `type`."""
    if value == "an object":
        return _missing(f"{field}.type" if field else "type", value, context)
    return InvalidRequest(f"{field} is {value}", field=field, value=value, allowed=("an object with a type",))


_DESCRIPTIONS: dict[str, Callable[[str, str, dict[str, Any]], InvalidRequest]] = {
    "missing": _missing,
    UNKNOWN: _unknown,
    "value_error": _of_models,
    "too_long": _too_long,
    "too_short": _too_short,
    UNSUPPORTED: _not_offered,
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
