"""One Prefill call: its events go to one hearer, and so does its failure. Knows no hand-over and no decode node."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.errors import BatonError, InternalError
from baton.rpc.status import from_rpc_error
from protos.baton.v1 import prefill_pb2 as pb

Call = grpc.aio.UnaryStreamCall[pb.PrefillRequest, pb.PrefillEvent]


@dataclass(frozen=True)
class PrefillSaid:
    call: "PrefillCall"
    event: pb.PrefillEvent


@dataclass(frozen=True)
class PrefillFailed:
    """The call is over, and not everything has been sent."""

    call: "PrefillCall"
    error: BatonError


class PrefillCall:
    """One prefill attempt, from the call to its last event. `close` ends it; nothing is heard of it afterwards."""

    def __init__(self, call: Call, *, hear: Callable[[PrefillSaid | PrefillFailed], None]) -> None:
        loop = asyncio.get_running_loop()
        self.running = True
        self.scheduled = False
        self.first_token_seen = False
        self.sent = False
        self.heard_at = loop.time()
        self._loop = loop
        self._call = call
        self._hear = hear
        self._task = asyncio.create_task(self._follow(), name="prefill-call")

    def close(self) -> None:
        if self.running:
            self.running = False
            self._task.cancel()
            self._call.cancel()

    async def _follow(self) -> None:
        error: BatonError = InternalError("the prefill node ended the call before everything was sent")
        try:
            async for event in self._call:
                self._note(event)
                self._hear(PrefillSaid(self, event))
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        if self.running:
            self.running = False
            if not self.sent:
                self._hear(PrefillFailed(self, error))

    def _note(self, event: pb.PrefillEvent) -> None:
        self.heard_at = self._loop.time()
        match event.WhichOneof("event"):
            case "scheduled":
                self.scheduled = True
            case "first_token":
                self.first_token_seen = True
            case "sent":
                self.sent = True
