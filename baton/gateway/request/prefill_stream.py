"""One Prefill call to a node, whose events and end go to callbacks."""

import asyncio
from collections.abc import Callable

import grpc

from baton.core.errors import BatonError
from baton.protos.internal.v1 import prefill_pb2
from baton.rpc.status import from_rpc_error


class PrefillStream:
    """One Prefill call. It makes no callbacks after `cancel`.

    Its task is not part of a TaskGroup: nothing waits for a cancelled call, and its failure concerns one request only.
    """

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent],
        on_event: Callable[[prefill_pb2.PrefillEvent], None],
        on_end: Callable[[BatonError | None], None],
    ) -> None:
        self.running = True
        self._call = call
        self._on_event = on_event
        self._on_end = on_end
        self._task = asyncio.create_task(self._follow(), name="prefill-call")

    def cancel(self) -> None:
        if self.running:
            self.running = False
            self._task.cancel()
            self._call.cancel()

    def end(self, error: BatonError) -> None:
        """Cancels the call and reports the error as its end."""
        if self.running:
            self.cancel()
            self._on_end(error)

    async def _follow(self) -> None:
        error: BatonError | None = None
        try:
            async for event in self._call:
                self._on_event(event)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        self.running = False
        self._on_end(error)
