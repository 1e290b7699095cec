"""Formats errors in Anthropic's shape. Pure."""

from typing import Any

from baton.core.errors import BatonError, ContextOverflow
from baton.gateway.http.errors import row_of, status_of

_BODY_TOO_LARGE = 413
# By this code, Anthropic's tool runners find out that they must send the whole conversation, without `thread`.
_NO_THREADS = {"error_code": "thread_unsupported_request"}


def anthropic_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """Returns an error's body, which is also the data of a stream's `error` event."""
    kind = "request_too_large" if status_of(error) == _BODY_TOO_LARGE else row_of(error).anthropic_type
    message = _too_long(error) if isinstance(error, ContextOverflow) else str(error)
    details = {"details": _NO_THREADS} if error.field == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, "request_id": request_id}


def _too_long(error: ContextOverflow) -> str:
    """Words the error as Anthropic does, because client libraries recognize it by its text."""
    return f"prompt is too long: {error.tokens} tokens > {error.max_prompt_tokens} maximum; {error.cure}"
