"""Converts Baton's errors to gRPC statuses with details, and back.

A status has our ErrorDetail and, for clients that know only standard details, google.rpc's RetryInfo, BadRequest,
RequestInfo and ErrorInfo.
"""

import asyncio
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.core import errors
from baton.core.error_codes import BY_GRPC, code_of
from baton.protos.v1 import common_pb2 as pb
from baton.rpc.error_detail import from_detail, to_detail

Request = TypeVar("Request")
Response = TypeVar("Response")

# Clients refuse headers over 8 KB by default. The rest is for keys, for what services add, and for HTTP/2.
_TRAILER_BYTES_MAX = 6500
_TEXT_BYTES = (2048, 1024, 512, 256, 96)  # limits of one text, tried in this order until the status fits
_ALLOWED_MAX = 16
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte != 0x25)  # `grpc-message` does not encode these

_DOMAIN = "baton.serving"  # google.rpc.ErrorInfo wants a service's name

_TOO_LARGE = re.compile(r"(CLIENT|SERVER): (Sent|Received) message larger than max \((\d+) vs\. \d+\)")

# The address of an inner connection, which clients must not see.
_ADDRESS = re.compile(r"\b(?:ipv4|ipv6|unix|dns|vsock):\S+ ?")

_CAUSES = {
    "ping timeout": "it answers no pings",
    "Hostname Verification Check failed": "its certificate is for another host or another role",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from the CA that is trusted here, or has expired",
    "Tls handshake failed": "the TLS handshake failed; the server may not use TLS",
    "http1.x server": "what answers there speaks HTTP/1; gRPC has a port of its own, by default 7000",
}


async def abort(
    context: grpc.aio.ServicerContext[Request, Response], error: errors.BatonError, *, request_id: str = ""
) -> NoReturn:
    """Ends the call with the error's status and details. Cuts long texts, so that they take less than 8 KB."""
    rich = rpc_status.to_status(to_status(error, request_id=request_id))
    trailers = tuple(rich.trailing_metadata)
    if error.retry_after_s is not None:
        trailers += (("grpc-retry-pushback-ms", str(math.ceil(1000 * error.retry_after_s))),)
    await context.abort(rich.code, rich.details, trailers)
    raise AssertionError("context.abort raises")


def to_status(error: errors.BatonError, *, request_id: str = "") -> status_pb2.Status:
    """The error as a google.rpc.Status that fits into a trailer."""
    for limit in _TEXT_BYTES:
        status = _status(_shortened(error, limit), request_id, limit)
        if _trailer_bytes(status) <= _TRAILER_BYTES_MAX:
            break
    return status


def _status(error: errors.BatonError, request_id: str, limit: int) -> status_pb2.Status:
    message = _cut(str(error), limit)
    details: list[Message] = [to_detail(error)]
    details.append(error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(1e9 * error.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code = code_pb2.Code.Value(code_of(error).grpc)
    if error.field and code == code_pb2.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=_cut(request_id, 256)))
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _shortened(error: errors.BatonError, limit: int) -> errors.BatonError:
    return type(error)(
        _cut(error.message, limit),
        field=_cut(error.field, 256),
        value=_cut(error.value, min(limit, 256)),
        allowed=tuple(_cut(each, 128) for each in error.allowed[:_ALLOWED_MAX]),
        cure=_cut(error.cure, limit),
        retry_after_s=error.retry_after_s,
    )


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of the text; "..." marks a cut."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    return data[: limit - 3].decode(errors="ignore") + "..."


def _trailer_bytes(status: status_pb2.Status) -> int:
    """Size of `grpc-message`, which is percent-encoded, and of `grpc-status-details-bin`, which is base64."""
    message = status.message.encode()
    percent_encoded = len(message) + 2 * len(message.translate(None, _PLAIN))
    size_bytes: int = status.ByteSize()
    return percent_encoded + 4 * math.ceil(size_bytes / 3)


@contextmanager
def client_may_leave() -> Iterator[None]:
    """Turns gRPC's refusal to write to an ended call into a cancellation of the handler inside.

    The client or the deadline has then ended the call, and gRPC is about to cancel the handler. It would log any other
    exception of the handler as an error.
    """
    over = False
    try:
        yield
    except* grpc.aio.InternalError:
        over = True
    if over:
        raise asyncio.CancelledError


def is_over(error: BaseException) -> bool:
    """Whether the error is gRPC's refusal to write to a call that its client or its deadline has ended."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_over, error.exceptions))
    return isinstance(error, grpc.aio.InternalError)


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.BatonError:
    """The Baton error of a failed call. A status without our detail becomes the nearest error."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            with suppress(DecodeError):  # damaged, or not a status of google.rpc
                return _from_status(status_pb2.Status.FromString(value), error)
    return _nearest(error)


def last_cause(error: grpc.aio.AioRpcError) -> str:
    """The last cause in the chain that gRPC reports for a failed connection."""
    message = from_rpc_error(error).message
    for mark, cause in _CAUSES.items():
        if mark in message:
            return cause
    return from_rpc_error(error).message.rpartition(": ")[2].rstrip("]")


def _from_status(status: status_pb2.Status, error: grpc.aio.AioRpcError) -> errors.BatonError:
    detail, request = pb.ErrorDetail(), error_details_pb2.RequestInfo()
    found = [packed.Unpack(detail) for packed in status.details if packed.Is(detail.DESCRIPTOR)]
    typed = from_detail(detail) if any(found) else _nearest(error)
    for packed in status.details:
        if packed.Is(request.DESCRIPTOR) and packed.Unpack(request):
            typed.request_id = request.request_id
    return typed


def _nearest(error: grpc.aio.AioRpcError) -> errors.BatonError:
    details = error.details() or error.code().name
    if found := _TOO_LARGE.search(details):
        side, did, size_bytes = found.groups()
        if (side, did) == ("CLIENT", "Received"):
            return errors.InternalError(f"the answer of {size_bytes} bytes is larger than this client accepts")
        return too_large(int(size_bytes), "this call")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.PeerRefused("the server's release does not know this call (docs/upgrades.md)")
    return BY_GRPC.get(error.code().name, errors.InternalError)(_ADDRESS.sub("", details))


def too_large(size_bytes: int, method: str, *, bytes_max: int | None = None) -> errors.InvalidRequest:
    """The error for a message that is larger than the server accepts."""
    return errors.InvalidRequest(
        f"the message of {size_bytes} bytes for {method} is too large",
        field="message",
        value=size_bytes,
        allowed=() if bytes_max is None else (f"up to {bytes_max} bytes",),
        cure="send less at once",
    )
