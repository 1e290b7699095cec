"""Every error that Baton raises on purpose. Knows nothing of grpc, torch or the environment.

BatonError
├── ConfigError          an operator's value is wrong; the process ends with exit code 2
├── InvalidRequest       a client's value is wrong
├── UnknownModel         nobody serves that model
├── Overloaded           no room now; says when to try again
├── NoNode               no node can take the request
├── Draining             the node takes no new work
├── DeadlineExceeded     the request's time is up
├── Cancelled            whoever asked for it no longer wants it
├── PeerRefused          two nodes cannot work together; lists every reason
├── UnknownLease         a reference to KV that this node did not give, or took back
├── DataLoss             KV arrived damaged, or is gone
└── InternalError        our mistake
"""

from typing import ClassVar


class BatonError(Exception):
    """Names the offending value, what is allowed, and the cure.

    Args:
        message: one sentence, without a full stop at its end.
        field, value: what was wrong, by the name that the user knows.
        allowed: the values that would have been right.
        cure: what to do next.
        retry_after_s: for errors that time heals.
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
