"""What each error is in HTTP: status, headers, and the body in OpenAI's shape.

BatonError
└── InvalidRequest
    └── Refused          a mistake in the HTTP request itself; has a status of its own
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from baton.core.errors import BatonError, ContextOverflow, InvalidRequest

ErrorShape = Callable[[BatonError, str], dict[str, Any]]
"""Error and request id to the body of the answer."""

_RETRY_AFTER_S = 1.0  # where waiting helps, and the error does not say how long
_RETRYABLE = (429, 503)

_STATUSES = {
    "INVALID_REQUEST": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "UNKNOWN_MODEL": 404,
    "OVERLOADED": 429,
    "NO_NODE": 503,
    "DRAINING": 503,
    "PEER_REFUSED": 503,
    "DEADLINE": 504,
    "CANCELLED": 499,  # as nginx says that a request was ended from outside; no client library retries it
}

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    499: "cancelled_error",
}
_CODES = {
    "UNAUTHENTICATED": "invalid_api_key",
    "UNKNOWN_MODEL": "model_not_found",
    "INVALID_REQUEST": "invalid_value",
}


class HttpRefusal(InvalidRequest):
    """A request that HTTP itself lets us refuse: path, method, size, type, syntax.

    Args:
        status: of the answer.
        code: in the answer's body.
        headers: further headers of the answer.
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
    return error.status if isinstance(error, HttpRefusal) else _STATUSES.get(error.reason, 500)


def headers_of(error: BatonError) -> dict[str, str]:
    """Says when to try again, in whole seconds as HTTP wants it and in milliseconds as OpenAI's clients read it."""
    headers = dict(error.headers) if isinstance(error, HttpRefusal) else {}
    if status_of(error) == 401:
        headers["www-authenticate"] = "Bearer"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status_of(error) in _RETRYABLE:
        retry_after_s = _RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(1000 * retry_after_s)))
    return headers


def openai_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """The body in OpenAI's shape."""
    status = status_of(error)
    return {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": error.field or None,
            "code": _code(error),
            "request_id": request_id,
        }
    }


def _code(error: BatonError) -> str:
    if isinstance(error, ContextOverflow):
        return "context_length_exceeded"  # OpenAI's, by which client libraries know it
    return error.code if isinstance(error, HttpRefusal) else _CODES.get(error.reason, error.reason.lower())


def error_response(error: BatonError, request_id: str, shape: ErrorShape = openai_error) -> Response:
    headers = {**headers_of(error), "x-request-id": request_id, "request-id": request_id}  # OpenAI's name, Anthropic's
    body = orjson.dumps(shape(error, request_id))
    return Response(body, status_of(error), headers, media_type="application/json")
