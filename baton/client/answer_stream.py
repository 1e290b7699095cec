"""Streams one request's events: retries refusals, and continues at another gateway when the first is lost."""

import asyncio
from collections.abc import AsyncGenerator
from time import monotonic

from baton.client.gateways import Gateway, Gateways, LostGateway, Retries, typed_errors
from baton.client.messages import event_from_message
from baton.client.outputs import Event
from baton.client.resumption import AnswerProgress, prepare
from baton.core.errors import BatonError
from baton.protos.v1 import generation_pb2 as pb

_TIMEOUT_S_MAX = 1e9  # gRPC overflows on longer timeouts and ends the call at once
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
    retries = Retries(None if timeout_s is None else monotonic() + min(timeout_s, _TIMEOUT_S_MAX), gateways.retry_s)
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
        if refusal is not None:
            await retries.wait(refusal)


class _Failures:
    """Decides whether a failed request is sent again, and to which gateway."""

    def __init__(self, gateways: Gateways, request_id: str) -> None:
        self._gateways = gateways
        self._request_id = request_id
        self._begun = False  # a part of the answer has arrived
        self._in_a_row = 0
        self._since_s = 0.0

    def answered(self, *, begun: bool) -> None:
        self._in_a_row = 0
        self._begun = self._begun or begun

    def failed(self, error: BatonError) -> BatonError:
        """Returns the error if the request may be sent again after it.

        Raises:
            BatonError: the error itself, because a started answer cannot be repeated.
        """
        error.request_id = error.request_id or self._request_id
        if self._begun:
            raise error from None
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
        if self._begun and len(self._gateways.all) > 1 and monotonic() <= self._since_s + _RESUME_S:
            await asyncio.sleep(_RESUME_EVERY_S)
            return None
        return self.failed(lost.error)
