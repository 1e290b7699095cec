"""From the bytes of a request's body to a checked model. Everything wrong is one `InvalidRequest` that names the field.

Pure but for `read_body`.
"""

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from baton.errors import InvalidRequest
from gateway.http.errors import Refused
from gateway.http.head import check_content

_DEPTH_MAX = 128  # arrays and objects within each other
_VALUES_MAX = 1 << 19  # each costs Python far more time than its bytes, and the event loop waits
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SHOWN_CHARACTERS = 80
_ALIKE = 0.8  # of 1: temprature and max_token are above, foo and text below
_SIZE = re.compile(r"\w+ should have (at (?:least|most) \d+ \w+).*")


class Body(BaseModel):
    """Base of the bodies. Values have exactly the JSON type that is asked for; an unknown field is refused by name,
    unless it is null."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), frozen=True)


AnyBody = TypeVar("AnyBody", bound=BaseModel)


async def read_body(chunks: AsyncIterator[bytes], headers: Mapping[str, str], *, bytes_max: int) -> bytes:
    """Reads the body, of declared or of unknown length.

    Raises:
        Refused: 413 as soon as it is too large; 415 for another media type, charset or coding.
    """
    check_content(headers)
    declared = headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that the body is.

    Raises:
        Refused: it is no JSON (NaN, lone surrogates and invalid UTF-8 are none), or no object, is nested too deeply,
            has too many values or names a key twice.
    """
    if body.count(b",") > _VALUES_MAX and (
        body.count(b'"') > 2 * _VALUES_MAX or _STRING.sub(b"", body).count(b",") > _VALUES_MAX
    ):
        allowed = (f"up to {_VALUES_MAX}",)
        raise Refused(413, "body_too_large", "the body has too many JSON values", allowed=allowed, cure="send less")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _syntax(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _syntax("the body is not a JSON object")
    if body.count(b"[") + body.count(b"{") > _DEPTH_MAX and _depth_exceeds(value, _DEPTH_MAX):
        raise _syntax(f"the body is nested more than {_DEPTH_MAX} deep")
    json.JSONDecoder(object_pairs_hook=_refuse_duplicates).decode(body.decode())  # orjson keeps the last one in silence
    return value


def check(model: type[AnyBody], value: Mapping[str, Any]) -> AnyBody:
    """The parsed object as a model.

    Raises:
        InvalidRequest: names the field.
    """
    given = {name: field for name, field in value.items() if field is not None}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise _invalid(model, given, error.errors(include_url=False, include_context=False)) from None


def parse(model: type[AnyBody], body: bytes) -> AnyBody:
    """The body as a model; raises as `parse_object` and `check`."""
    return check(model, parse_object(body))


def shown(value: object) -> str:
    """A wrong value in short, for an error's message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _invalid(model: type[BaseModel], given: Mapping[str, Any], details: list[ErrorDetails]) -> InvalidRequest:
    """The first mistake. Of a field with several forms: the form that comes farthest, and what else it may be there."""
    about_first = [detail for detail in details if detail["loc"][:1] == details[0]["loc"][:1]]
    found = [(*_locate(given, detail["loc"]), detail) for detail in about_first]
    field, value, detail = max(found, key=lambda each: each[0].count(".") + each[0].count("["))
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {shown(field)}", field=field, cure=_cure_for_unknown(model, field))
    if detail["type"] == "missing":
        field = f"{field}.{detail['loc'][-1]}" if field else str(detail["loc"][-1])
        return InvalidRequest(f"{field} is missing", field=field)
    if detail["type"] == "value_error":  # of our own validators
        return InvalidRequest(detail["msg"].removeprefix("Value error, "), field=field, value=shown(value))
    forms = [_form(other) for at, _, other in found if at == field]
    allowed = tuple(dict.fromkeys(forms))
    return InvalidRequest(f"{field} is {shown(value)}", field=field, value=shown(value), allowed=allowed)


def _form(detail: ErrorDetails) -> str:
    """What would be right, in pydantic's words without their subject."""
    return _SIZE.sub(r"\1", detail["msg"].removeprefix("Input should be "))


def _cure_for_unknown(model: type[BaseModel], field: str) -> str:
    nearest = get_close_matches(field[:_SHOWN_CHARACTERS], model.model_fields, n=1, cutoff=_ALIKE)
    return f"did you mean {nearest[0]}?" if nearest else "leave it out; /docs lists all fields"


def _locate(given: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[str, Any]:
    """Name and value of the wrong field. A union adds names of its members to `loc`, which the body does not have."""
    name = ""
    value: Any = given
    for part in loc:
        if isinstance(value, dict) and part in value:
            name, value = f"{name}.{part}" if name else str(part), value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            name, value = f"{name}[{part}]", value[part]
    return name, value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise InvalidRequest(f"the body has the key {shown(twice)} twice", field=twice[:_SHOWN_CHARACTERS])


def _depth_exceeds(value: object, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        nested: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            nested += [child for child in children if isinstance(child, dict | list)]
        if not nested:
            return False
        level = nested
    return True


def _too_large(bytes_max: int) -> Refused:
    headers = {"connection": "close"}  # the rest of the body is not read
    cure = "send less, or raise BATON_HTTP_BODY_MIB"
    return Refused(413, "body_too_large", f"the body has more than {bytes_max} bytes", cure=cure, headers=headers)


def _syntax(message: str) -> Refused:
    return Refused(400, "invalid_json", message)
