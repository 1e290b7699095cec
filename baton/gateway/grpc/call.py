"""Handles what all gRPC calls of the gateway share: request id, trace, deadline, and errors as statuses."""

import logging
from collections.abc import AsyncIterator, Sequence, Sized
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from baton.core.errors import BatonError, InternalError, InvalidRequest
from baton.gateway.core.json_reader import VALUES_MAX
from baton.gateway.serving.validate import check_request_id
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.status import abort, client_may_leave
from baton.tracing.context import read_context

log = logging.getLogger("baton")

Context = grpc.aio.ServicerContext[Any, Any]

_IDS_MAX = 4096
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class GrpcCall:
    """One gRPC call. `begin` determines its request id and sends the id to the client."""

    def __init__(self, context: Context) -> None:
        self.request_id = ""
        traceparents: list[str] = []
        states: list[str] = []
        self._context = context
        self._given = ""
        for key, value in context.invocation_metadata() or ():
            if key == "x-request-id":
                self._given = str(value)
            elif key == "traceparent":
                traceparents.append(str(value))
            elif key == "tracestate":
                states.append(str(value))
        self.trace = read_context(traceparents[0], ",".join(states)) if len(traceparents) == 1 else None

    @property
    def budget_s(self) -> float | None:
        """Seconds left until the client's deadline; None if it set none."""
        remaining_s: float | None = self._context.time_remaining()
        return remaining_s

    async def begin(self, request_id: str = "") -> str:
        """Returns the request id: the message's, else the metadata's, else a new one. Sends it as initial metadata.

        Raises:
            InvalidRequest: the id is too long, or has control characters.
        """
        self.request_id = check_request_id(request_id or self._given)
        await self._context.send_initial_metadata((("x-request-id", quote(self.request_id, safe=_PRINTABLE)),))
        return self.request_id

    def note(self, message: pb.GenerateResponse) -> None:
        """Copies the receipt from the first output's last message to the trailing metadata."""
        if message.finish_reason and not message.index:
            self.send_receipt(message.receipt)

    def send_receipt(self, receipt: common_pb2.Receipt) -> None:
        self._context.set_trailing_metadata((("baton-receipt-bin", receipt.SerializeToString()),))

    async def unimplemented(self, reason: str) -> NoReturn:
        """Ends the call of a method that Baton does not implement."""
        await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)
        raise AssertionError("context.abort raises")


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[GrpcCall]:
    """Yields the call. An error inside the block ends the call with the error's status."""
    call = GrpcCall(context)
    with client_may_leave():
        try:
            yield call
        except BatonError as error:
            await abort(context, error, request_id=call.request_id)
        except (grpc.aio.InternalError, grpc.aio.AbortError):
            raise
        except Exception as error:
            log.exception("request %s failed", call.request_id or "without an id")
            unexpected = InternalError(f"{type(error).__name__} in the gateway", cure="see the gateway's log")
            await abort(context, unexpected, request_id=call.request_id)


def check_count(field: str, values: Sized) -> None:
    """Checks the number of values in a field of a message.

    Raises:
        InvalidRequest: the field has more values than the HTTP APIs allow in a body.
    """
    if len(values) > VALUES_MAX:
        allowed = (f"up to {VALUES_MAX}",)
        raise InvalidRequest(f"{field} has {len(values)} elements", field=field, value=len(values), allowed=allowed)


def check_ids(field: str, request_ids: Sequence[str]) -> None:
    """Checks the request ids in a field of a message.

    Raises:
        InvalidRequest: there are too many ids, or one is not a valid request id.
    """
    if len(request_ids) > _IDS_MAX:
        allowed = (f"up to {_IDS_MAX} ids",)
        raise InvalidRequest(
            f"{field} has {len(request_ids)} ids", field=field, value=len(request_ids), allowed=allowed
        )
    for request_id in request_ids:
        check_request_id(request_id)
