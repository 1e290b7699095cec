"""Converts Baton's errors to messages and back, for streams that go on after one request fails. Needs no grpc."""

from baton.core import errors
from baton.core.error_codes import BY_REASON
from baton.protos.v1 import common_pb2 as pb


def to_detail(error: errors.BatonError) -> pb.ErrorDetail:
    """The error as a message."""
    detail = pb.ErrorDetail(
        reason=pb.ErrorReason.Value(f"ERROR_REASON_{error.reason}"),
        message=error.message,
        field=error.field,
        value=error.value,
        allowed=error.allowed,
        cure=error.cure,
    )
    if error.retry_after_s is not None:
        detail.retry_after_s = error.retry_after_s
    return detail


def from_detail(detail: pb.ErrorDetail) -> errors.BatonError:
    """The error in a message. A reason that only newer versions know becomes an InternalError."""
    value = pb.ErrorReason.DESCRIPTOR.values_by_number.get(detail.reason)
    reason = "" if value is None else value.name.removeprefix("ERROR_REASON_")
    return BY_REASON.get(reason, errors.InternalError)(
        detail.message,
        field=detail.field,
        value=detail.value,
        allowed=tuple(detail.allowed),
        cure=detail.cure,
        retry_after_s=detail.retry_after_s if detail.HasField("retry_after_s") else None,
    )
