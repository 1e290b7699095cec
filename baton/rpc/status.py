"""Converts Baton's errors to gRPC statuses with details, and back."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from baton import errors
from baton.error_detail import from_detail, to_detail
from protos.baton.v1 import common_pb2 as pb

Request = TypeVar("Request")
Response = TypeVar("Response")

_CODES: dict[str, int] = {
    "INVALID_REQUEST": code_pb2.INVALID_ARGUMENT,
    "UNKNOWN_MODEL": code_pb2.NOT_FOUND,
    "OVERLOADED": code_pb2.RESOURCE_EXHAUSTED,
    "NO_NODE": code_pb2.UNAVAILABLE,
    "DRAINING": code_pb2.UNAVAILABLE,
    "DEADLINE": code_pb2.DEADLINE_EXCEEDED,
    "CANCELLED": code_pb2.CANCELLED,
    "PEER_REFUSED": code_pb2.FAILED_PRECONDITION,
    "UNKNOWN_LEASE": code_pb2.FAILED_PRECONDITION,
    "DATA_LOSS": code_pb2.DATA_LOSS,
    "INTERNAL": code_pb2.INTERNAL,
}

_BY_STATUS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.UnknownModel,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.UNAVAILABLE: errors.NoNode,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
}


async def abort(context: grpc.aio.ServicerContext[Request, Response], error: errors.BatonError) -> NoReturn:
    """Ends the call with the error's status and detail."""
    packed = any_pb2.Any()
    packed.Pack(to_detail(error))
    status = status_pb2.Status(code=_CODES[error.reason], message=str(error), details=[packed])
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("context.abort raises")


@contextmanager
def client_may_leave() -> Iterator[None]:
    """Turns gRPC's refusal to write to a call that is over into a cancellation of the handler inside.

    The client or the deadline has then ended the call, and gRPC is about to cancel the handler. gRPC logs every other
    exception of a handler as an error.
    """
    over = False
    try:
        yield
    except* grpc.aio.InternalError:
        over = True
    if over:
        raise asyncio.CancelledError


def from_rpc_error(error: grpc.aio.AioRpcError) -> errors.BatonError:
    """The Baton error of a failed call. A status without our detail becomes the nearest error."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return _from_status(status_pb2.Status.FromString(value), error)
    return _nearest(error)


def last_cause(error: grpc.aio.AioRpcError) -> str:
    """The last cause in the chain that gRPC reports for a failed connection."""
    return from_rpc_error(error).message.rpartition(": ")[2].rstrip("]")


def _from_status(status: status_pb2.Status, error: grpc.aio.AioRpcError) -> errors.BatonError:
    for packed in status.details:
        detail = pb.ErrorDetail()
        if packed.Is(pb.ErrorDetail.DESCRIPTOR) and packed.Unpack(detail):
            return from_detail(detail)
    return _nearest(error)


def _nearest(error: grpc.aio.AioRpcError) -> errors.BatonError:
    return _BY_STATUS.get(error.code(), errors.InternalError)(error.details() or error.code().name)
