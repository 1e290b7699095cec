"""What every gRPC service of the gateway needs of one call: its request id, its trace, its errors as statuses."""

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
    """One call. `begin` decides its request id and sends it to the client."""

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
        """Time left until the client's deadline; None: it has none."""
        remaining_s: float | None = self._context.time_remaining()
        return remaining_s

    async def begin(self, request_id: str = "") -> str:
        """Sends the request id as initial metadata, and returns it: the message's, else the metadata's, else a new one.

        Raises:
            InvalidRequest: the id is too long, or has control characters.
        """
        self.request_id = check_request_id(request_id or self._given)
        await self._context.send_initial_metadata((("x-request-id", quote(self.request_id, safe=_PRINTABLE)),))
        return self.request_id

    def note(self, message: pb.GenerateResponse) -> None:
        """Takes the receipt for the trailing metadata from an output's last message."""
        if message.finish_reason and not message.index:
            self.send_receipt(message.receipt)

    def send_receipt(self, receipt: common_pb2.Receipt) -> None:
        self._context.set_trailing_metadata((("baton-receipt-bin", receipt.SerializeToString()),))

    async def unimplemented(self, reason: str) -> NoReturn:
        """Ends the call of a method that Baton does not have."""
        await self._context.abort(grpc.StatusCode.UNIMPLEMENTED, reason)
        raise AssertionError("context.abort raises")


@asynccontextmanager
async def answering(context: Context) -> AsyncIterator[GrpcCall]:
    """The call; an error inside ends it with its status."""
    call = GrpcCall(context)
    with client_may_leave():
        try:
            yield call
        except BatonError as error:
            await abort(context, error, request_id=call.request_id)
        except (grpc.aio.InternalError, grpc.aio.AbortError):
            raise
        except Exception as error:
            log.exception("%s failed", call.request_id or "a request")
            unexpected = InternalError(f"{type(error).__name__} in the gateway", cure="see its log")
            await abort(context, unexpected, request_id=call.request_id)


def check_count(field: str, values: Sized) -> None:
    """Checks the number of values of a message.

    Raises:
        InvalidRequest: there are more values than a body of HTTP may have.
    """
    if len(values) > VALUES_MAX:
        allowed = (f"up to {VALUES_MAX}",)
        raise InvalidRequest(f"{field} has {len(values)} elements", field=field, value=len(values), allowed=allowed)


def check_ids(field: str, request_ids: Sequence[str]) -> None:
    """Checks the ids of requests that a message names.

    Raises:
        InvalidRequest: there are too many ids, or one cannot be a request's.
    """
    if len(request_ids) > _IDS_MAX:
        allowed = (f"up to {_IDS_MAX} ids",)
        raise InvalidRequest(
            f"{field} has {len(request_ids)} ids", field=field, value=len(request_ids), allowed=allowed
        )
    for request_id in request_ids:
        check_request_id(request_id)
