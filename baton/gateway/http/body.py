"""From the bytes of a request's body to a JSON object and a checked model. Everything wrong is one `InvalidRequest`.

Pure but for `read_body`.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from baton.core.errors import InvalidRequest
from baton.gateway.core.json_reader import KeyTwice, NotJson, TooMuchJson, parse_json
from baton.gateway.http.checking import M, checked, short
from baton.gateway.http.errors import HttpRefusal
from baton.gateway.http.head import check_content


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
        Refused: it is no JSON, or no object, or has too many values.
        InvalidRequest: it names a key twice.
    """
    try:
        value = parse_json(body)
    except NotJson as error:
        raise HttpRefusal(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    except TooMuchJson as error:
        message, allowed = f"the body has {error}", (error.allowed,)
        raise HttpRefusal(413, "body_too_large", message, allowed=allowed, cure="send less") from None
    except KeyTwice as error:
        raise InvalidRequest(f"the body has the key {short(error.key)} twice", field=error.field) from None
    if not isinstance(value, dict):
        raise HttpRefusal(400, "invalid_json", "the body is not a JSON object")
    return value


def parse(model: type[M], body: bytes) -> M:
    """The body as a model; raises as `parse_object` and `checked`."""
    return checked(model, parse_object(body))


def _too_large(bytes_max: int) -> HttpRefusal:
    headers = {"connection": "close"}  # the rest of the body is not read
    cure = "send less"
    return HttpRefusal(413, "body_too_large", f"the body has more than {bytes_max} bytes", cure=cure, headers=headers)
