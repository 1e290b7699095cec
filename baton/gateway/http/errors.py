"""Converts errors to HTTP answers: status, headers, and the body in OpenAI's shape.

BatonError
└── InvalidRequest
    └── HttpRefusal      a mistake in the HTTP request itself; has a status of its own
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from baton.core.error_codes import BY_HTTP, ErrorCode, code_of
from baton.core.errors import BatonError, InternalError, InvalidRequest

ErrorShape = Callable[[BatonError, str], dict[str, Any]]
"""Formats an error and its request id as the body of the answer."""

_RETRY_AFTER_S = 1.0  # for retryable errors that name no time


class HttpRefusal(InvalidRequest):
    """A mistake in the HTTP request itself: its path, method, size, type or syntax.

    Args:
        status: HTTP status of the answer.
        code: error code in the answer's body.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str = "",
        value: object = "",
        allowed: tuple[str, ...] = (),
        cure: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, field=field, value=value, allowed=allowed, cure=cure)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


def status_of(error: BatonError) -> int:
    return error.status if isinstance(error, HttpRefusal) else code_of(error).http


def row_of(error: BatonError) -> ErrorCode:
    """Returns the error's row in the table; for an HttpRefusal, the row of its status or of a similar one."""
    if not isinstance(error, HttpRefusal):
        return code_of(error)
    return BY_HTTP.get(error.status) or code_of(InvalidRequest if error.status < 500 else InternalError)


def headers_of(error: BatonError) -> dict[str, str]:
    """Returns the headers. A retry time is in whole seconds for HTTP, and in milliseconds for OpenAI's clients."""
    headers = dict(error.headers) if isinstance(error, HttpRefusal) else {}
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * wait_s)))
    return headers


def retry_after_s(error: BatonError) -> float | None:
    """Returns when to try again; None: waiting does not help."""
    if error.retry_after_s is None and code_of(error).retryable:
        return _RETRY_AFTER_S
    return error.retry_after_s


def openai_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """Returns the body in OpenAI's shape."""
    return {
        "error": {
            "message": str(error),
            "type": row_of(error).openai_type,
            "param": error.field or None,
            "code": error.code if isinstance(error, HttpRefusal) else code_of(error).openai_code,
            "request_id": request_id,
        }
    }


def error_response(error: BatonError, request_id: str, shape: ErrorShape = openai_error) -> Response:
    headers = {**headers_of(error), "x-request-id": request_id, "request-id": request_id}  # OpenAI's, Anthropic's
    body = orjson.dumps(shape(error, request_id))
    return Response(body, status_of(error), headers, media_type="application/json")
