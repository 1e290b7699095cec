"""Maps errors to the codes of every door: one row for each class of `baton.core.errors`.

gRPC code and HTTP status agree: an error that a retry may cure is UNAVAILABLE and 503, or RESOURCE_EXHAUSTED and 429.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from baton.core import errors
from baton.core.errors import BatonError


class ErrorCode(NamedTuple):
    """One row. The reason in UPPER_SNAKE is the class's own.

    Args:
        error: the class; its subclasses without a row share this one.
        grpc: name of the google.rpc.Code.
        http: status.
        openai_type, openai_code: `error.type` and `error.code` in OpenAI's shape.
        anthropic_type: `error.type` in Anthropic's shape.
        retryable: whether the same request may succeed later.
    """

    error: type[BatonError]
    grpc: str
    http: int
    openai_type: str
    openai_code: str
    anthropic_type: str
    retryable: bool = False


_WRONG, _BUSY, _DOWN = "invalid_request_error", "rate_limit_error", "service_unavailable_error"

# If several rows have one gRPC code, the first one stands for statuses of other programs.
TABLE = (
    ErrorCode(errors.InvalidRequest, "INVALID_ARGUMENT", 400, _WRONG, "invalid_value", _WRONG),
    ErrorCode(errors.ContextOverflow, "INVALID_ARGUMENT", 400, _WRONG, "context_length_exceeded", _WRONG),
    ErrorCode(errors.ConfigError, "INVALID_ARGUMENT", 400, _WRONG, "invalid_value", _WRONG),
    ErrorCode(
        errors.Unauthenticated,
        "UNAUTHENTICATED",
        401,
        "authentication_error",
        "invalid_api_key",
        "authentication_error",
    ),
    ErrorCode(
        errors.PermissionDenied, "PERMISSION_DENIED", 403, "permission_error", "permission_denied", "permission_error"
    ),
    ErrorCode(errors.UnknownModel, "NOT_FOUND", 404, _WRONG, "model_not_found", "not_found_error"),
    ErrorCode(errors.Overloaded, "RESOURCE_EXHAUSTED", 429, _BUSY, "overloaded", _BUSY, retryable=True),
    ErrorCode(errors.NoNode, "UNAVAILABLE", 503, _DOWN, "no_node", "overloaded_error", retryable=True),
    ErrorCode(errors.Draining, "UNAVAILABLE", 503, _DOWN, "draining", "overloaded_error", retryable=True),
    # A retry may help: another pair of nodes may fit, and an upgrade under way ends.
    ErrorCode(errors.PeerRefused, "UNAVAILABLE", 503, _DOWN, "peer_refused", "overloaded_error", retryable=True),
    ErrorCode(errors.DeadlineExceeded, "DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded", "timeout_error"),
    # nginx's status for a request that was ended from outside; no client library retries it.
    ErrorCode(errors.Cancelled, "CANCELLED", 499, "cancelled_error", "cancelled", "api_error"),
    ErrorCode(errors.InternalError, "INTERNAL", 500, "server_error", "internal", "api_error"),
    # Between nodes only: a client that gets it has found a bug.
    ErrorCode(errors.UnknownLease, "INTERNAL", 500, "server_error", "unknown_lease", "api_error"),
    ErrorCode(errors.DataLoss, "DATA_LOSS", 500, "server_error", "data_loss", "api_error"),
)

_BY_CLASS: Mapping[type[BatonError], ErrorCode] = MappingProxyType({row.error: row for row in TABLE})
_INTERNAL = _BY_CLASS[errors.InternalError]

BY_REASON: Mapping[str, type[BatonError]] = MappingProxyType({row.error.reason: row.error for row in reversed(TABLE)})
BY_GRPC: Mapping[str, type[BatonError]] = MappingProxyType({row.grpc: row.error for row in reversed(TABLE)})
BY_HTTP: Mapping[int, ErrorCode] = MappingProxyType({row.http: row for row in reversed(TABLE)})


def code_of(error: BatonError | type[BatonError]) -> ErrorCode:
    """The row of the error's class, or of the nearest class above it that has one."""
    kind = error if isinstance(error, type) else type(error)
    return next((_BY_CLASS[each] for each in kind.__mro__ if each in _BY_CLASS), _INTERNAL)
