"""Streams one request's events: retries refusals, and continues at another gateway when the first is lost."""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic

from baton.client.gateways import TIMEOUT_S_MAX, Gateway, Gateways, LostGateway, Retries, typed_errors
from baton.client.messages import event_from_message
from baton.client.outputs import Event
from baton.client.resumption import AnswerProgress, prepare
from baton.core.errors import BatonError
from baton.protos.v1 import generation_pb2 as pb

# While no gateway can be reached, a started answer tries all gateways at this interval, for this long.
_RESUME_S, _RESUME_EVERY_S = 10.0, 0.5


async def stream(
    gateways: Gateways, request: pb.GenerateRequest, timeout_s: float | None
) -> AsyncGenerator[Event, None]:
    """Yields the request's events, across retries and gateways. Closing the generator ends the request.

    Raises:
        BatonError: the request failed; the error's `request_id` is set.
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
    """Decides whether a failed request is sent again, and to which gateway."""

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
        """Switches to the next gateway. Once all of them failed, returns or raises as `failed` does.

        A started answer first keeps trying for some seconds, if there are several gateways.
        """
        self._gateways.leave(gateway)
        self._since_s = self._since_s if self._in_a_row else monotonic()
        self._in_a_row += 1
        if self._in_a_row % len(self._gateways.all):
            return None
        if self.begun and len(self._gateways.all) > 1 and monotonic() <= self._since_s + _RESUME_S:
            await asyncio.sleep(_RESUME_EVERY_S)
            return None
        return self.failed(lost.error)
