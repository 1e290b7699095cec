"""Errors in Anthropic's shape. Pure."""

from typing import Any

from baton.core.errors import BatonError, ContextOverflow
from baton.gateway.http.errors import status_of

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """The body of the answer, and the data of a stream's event `error`."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if 400 <= status < 499 else "api_error")
    message = _too_long(error) if isinstance(error, ContextOverflow) else str(error)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _too_long(error: ContextOverflow) -> str:
    """In Anthropic's words, by which client libraries know it."""
    return f"prompt is too long: {error.tokens} tokens > {error.max_prompt_tokens} maximum; {error.cure}"
