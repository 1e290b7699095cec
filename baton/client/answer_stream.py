"""The events of one request: sent again after a refusal, and continued at another gateway where the first is lost."""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic

from baton.client.gateways import TIMEOUT_S_MAX, Gateway, Gateways, LostGateway, Retries, typed_errors
from baton.client.messages import event_from_message
from baton.client.outputs import Event
from baton.client.resumption import AnswerProgress, prepare
from baton.core.errors import BatonError
from baton.protos.v1 import generation_pb2 as pb

# While no gateway can be reached, an answer that has begun waits so long, and tries all of them so often.
_RESUME_S, _RESUME_EVERY_S = 10.0, 0.5


async def stream(
    gateways: Gateways, request: pb.GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[Event, None]:
    """The request's events, from as many gateways and attempts as it takes. Closing it ends the request.

    Raises:
        BatonError: the request failed; `request_id` is set.
    """
    several = len(gateways.all) > 1
    prepare(request, resumes=several)
    retries = Retries(None if timeout_s is None else monotonic() + min(timeout_s, TIMEOUT_S_MAX), gateways.retry_s)
    progress = AnswerProgress(request)
    failures = _Failures(gateways, request.request_id)
    while True:
        gateway = gateways.current
        call = gateway.stub.Generate(progress.request(), timeout=retries.left_s())
        try:
            with typed_errors(gateway):
                async for response in call:
                    passed = progress.take(response) if several else response
                    if passed is not None:
                        failures.answered(begun=not passed.notice)
                        yield event_from_message(passed, request.request_id)
            return
        except LostGateway as lost:
            refusal = await failures.lost(gateway, lost)
        except BatonError as error:
            refusal = failures.failed(error)
        finally:
            call.cancel()
        if refusal is not None and (failures.begun or not await retries.wait(refusal)):
            try:
                raise refusal from None
            finally:
                refusal = None  # see `Retries.wait`


class _Failures:
    """Decides what follows a failure of one request."""

    def __init__(self, gateways: Gateways, request_id: str) -> None:
        self._gateways = gateways
        self._request_id = request_id
        self.begun = False  # a part of the answer has come, so the request cannot be sent again from its start
        self._in_a_row = 0
        self._since_s = 0.0

    def answered(self, *, begun: bool) -> None:
        self._in_a_row = 0
        self.begun = self.begun or begun

    def failed(self, error: BatonError) -> BatonError:
        """Returns the error, which names the request from now on."""
        error.request_id = error.request_id or self._request_id
        return error

    async def lost(self, gateway: Gateway, lost: LostGateway) -> BatonError | None:
        """Goes on to the next gateway; as `failed`, if none can be reached."""
        self._gateways.leave(gateway)
        self._since_s = self._since_s if self._in_a_row else monotonic()
        self._in_a_row += 1
        if self._in_a_row % len(self._gateways.all):
            return None
        if self.begun and len(self._gateways.all) > 1 and monotonic() <= self._since_s + _RESUME_S:
            await asyncio.sleep(_RESUME_EVERY_S)
            return None
        return self.failed(lost.error)
