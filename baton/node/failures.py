"""Log lines of a node about single requests: one for each failed request, with the client's request id and the cause.

The lines also have the engine's id, by which the node and its ranks name the request.
"""

import logging

from baton.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    Overloaded,
    UnknownLease,
)
from baton.core.log_lines import loggable

log = logging.getLogger("baton")

# Errors that others cause, and refusals: the gateway counts and logs what becomes of the request.
_EXPECTED = (Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, UnknownLease)


def log_arrival(request_id: str, engine_id: str) -> None:
    """Logs the arrival of a request."""
    log.debug("request arrived", extra={"fields": _fields(request_id, engine_id)})


def log_failure(error: BatonError, request_id: str, engine_id: str) -> None:
    """Logs that a request failed here. Its gateway may continue it elsewhere."""
    level = logging.DEBUG if isinstance(error, _EXPECTED) else logging.WARNING
    fields = {**_fields(request_id, engine_id), "reason": error.reason}
    log.log(level, "request failed here: %s", loggable(error), extra={"fields": fields})


def _fields(request_id: str, engine_id: str) -> dict[str, object]:
    return {"request_id": request_id, "engine_id": engine_id}
