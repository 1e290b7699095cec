"""Every error that Baton raises on purpose.

BatonError
├── ConfigError          a setting is wrong; the process ends with exit code 2
├── InvalidRequest       a value of a request is wrong
├── Unauthenticated      the caller has not shown who it is, or its key or certificate is not valid
├── PermissionDenied     the caller may not do that
├── UnknownModel         no gateway or node serves the model
├── Overloaded           there is no room now; carries the time after which to retry
├── NoNode               no node can take the request
├── Draining             the node takes no new work
├── DeadlineExceeded     the request's deadline has passed
├── Cancelled            the caller cancelled the request
├── PeerRefused          two nodes cannot work together; lists every reason
├── UnknownLease         the node never granted this lease, or has ended it
├── DataLoss             KV arrived damaged or was lost
└── InternalError        a bug in Baton
"""

from typing import ClassVar


class BatonError(Exception):
    """Base of all errors. Names the wrong value, the allowed ones and the cure.

    Args:
        message: one sentence without a full stop.
        field, value: name of the wrong setting or request field, as the user knows it, and its value.
        allowed: the allowed values.
        cure: what to do next.
        retry_after_s: when to try again, if waiting helps.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        value: object = "",
        allowed: tuple[str, ...] = (),
        cure: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        self.message = message
        self.field = field
        self.value = str(value)
        self.allowed = allowed
        self.cure = cure
        self.retry_after_s = retry_after_s
        self.request_id = ""  # of the request that it ended, set by the gateway
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.allowed:
            parts.append(f"allowed: {', '.join(self.allowed)}")
        if self.cure:
            parts.append(self.cure)
        return "; ".join(parts)


class ConfigError(BatonError):
    reason = "INVALID_REQUEST"


class InvalidRequest(BatonError):
    reason = "INVALID_REQUEST"


class Unauthenticated(BatonError):
    reason = "UNAUTHENTICATED"


class PermissionDenied(BatonError):
    reason = "PERMISSION_DENIED"


class UnknownModel(BatonError):
    reason = "UNKNOWN_MODEL"


class Overloaded(BatonError):
    reason = "OVERLOADED"


class NoNode(BatonError):
    reason = "NO_NODE"


class Draining(BatonError):
    reason = "DRAINING"


class DeadlineExceeded(BatonError):
    reason = "DEADLINE"


class Cancelled(BatonError):
    reason = "CANCELLED"


class PeerRefused(BatonError):
    reason = "PEER_REFUSED"


class UnknownLease(BatonError):
    reason = "UNKNOWN_LEASE"


class DataLoss(BatonError):
    reason = "DATA_LOSS"


class InternalError(BatonError):
    reason = "INTERNAL"
