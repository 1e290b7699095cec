"""Reads the body of an HTTP request, up to a limit, and parses it as JSON. Knows no endpoint."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.gateway.core.json_reader import DuplicateKey, NotJson, TooManyValues, parse_json
from baton.gateway.http.checking import M, checked
from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.field_errors import short
from baton.gateway.http.head import check_content


async def read_body(chunks: AsyncIterator[bytes], headers: Mapping[str, str], *, bytes_max: int) -> bytes:
    """Reads the whole body.

    Raises:
        HttpRefusal: 413 as soon as the body is too large, or 415 for a wrong media type, charset or coding.
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
    """Parses the body as a JSON object.

    Raises:
        HttpRefusal: the body is not JSON, is not an object, or has too many values.
        InvalidRequest: an object has the same key twice.
    """
    try:
        value = parse_json(body)
    except NotJson as error:
        raise HttpRefusal(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    except TooManyValues as error:
        message, allowed = f"the body has {error}", (error.allowed,)
        raise HttpRefusal(413, "body_too_large", message, allowed=allowed, cure="send a smaller body") from None
    except DuplicateKey as error:
        raise InvalidRequest(f"the body has the key {short(error.key)} twice", field=error.field) from None
    if not isinstance(value, dict):
        raise HttpRefusal(400, "invalid_json", "the body is not a JSON object")
    return value


def parse(model: type[M], body: bytes) -> M:
    """Parses the body as a model. Raises what `parse_object` and `checked` raise."""
    return checked(model, parse_object(body))


def _too_large(bytes_max: int) -> HttpRefusal:
    headers = {"connection": "close"}  # because the rest of the body is not read
    cure = "send a smaller body"
    return HttpRefusal(413, "body_too_large", f"the body has more than {bytes_max} bytes", cure=cure, headers=headers)
