"""The Session stream with one decode node: all requests of this gateway on that node, identified by key.

Owns the keys. No key is used twice; the node's last message for a key is `Released`.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from baton.gateway.core.events import DecodeReply
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.rpc.status import from_rpc_error

log = logging.getLogger("baton")

_RELEASE_TIMEOUT_S = 30.0

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@dataclass(frozen=True, slots=True)
class TokenReceiver:
    """Callbacks for one request's tokens, for the node's other messages about it, and for the end of the session."""

    token: Callable[[pb.StepToken], None]
    receive: Callable[[DecodeReply], None]
    lost: Callable[[str], None]


class DecodeSession:
    """The Session stream. Must be created on the event loop; `close` ends it.

    Args:
        on_message: called at every message, as a sign of life.
        on_lost: called once, with the reason, when the stream ends other than by `drop` or `close`.
    """

    def __init__(
        self, call: Call, *, name: str, on_message: Callable[[], None], on_lost: Callable[[str], None]
    ) -> None:
        self.open = True
        self._call = call
        self._name = name
        self._on_message = on_message
        self._on_lost = on_lost
        self._keys = itertools.count(1)
        self._receivers: dict[int, TokenReceiver | None] = {}  # None: the request has left, `Released` is awaited
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"session-{name}")

    @property
    def num_unreleased(self) -> int:
        """Number of requests that the node has not released yet."""
        return len(self._receivers)

    def submit(self, request: pb.SubmitRequest, receiver: TokenReceiver) -> int:
        """Sends the request under a new key and returns the key; `receiver` gets all messages for it until `leave`."""
        key = next(self._keys)
        request.key = key
        if self.open:
            self._receivers[key] = receiver
            self._outbox.put_nowait(pb.SessionRequest(submit=request))
        else:
            receiver.lost("its session is closed")
        return key

    def ask(self, key: int, message: pb.RenewTicket | pb.PrefillHere) -> None:
        """Sends another message about a request."""
        message.key = key
        if isinstance(message, pb.RenewTicket):
            self._outbox.put_nowait(pb.SessionRequest(renew=message))
        else:
            self._outbox.put_nowait(pb.SessionRequest(here=message))

    def leave(self, key: int, *, cancel: bool) -> None:
        """Stops receiving for this key; `cancel` makes the node end the request. A second call has no effect."""
        if self._receivers.get(key) is None:
            return
        self._receivers[key] = None
        if cancel:
            self._outbox.put_nowait(pb.SessionRequest(cancel=pb.CancelRequest(key=key)))
        asyncio.get_running_loop().call_later(_RELEASE_TIMEOUT_S, self._check_released, key)

    def drop(self, reason: str) -> None:
        """Ends the stream; all requests on it get the reason. A second call has no effect."""
        if not self.open:
            return
        self.open = False
        self._task.cancel()
        self._call.cancel()
        receivers = [receiver for receiver in self._receivers.values() if receiver is not None]
        self._receivers.clear()
        for receiver in receivers:
            receiver.lost(reason)

    async def close(self, reason: str) -> None:
        """Ends the stream. The node then ends all requests on it."""
        self.drop(reason)
        await asyncio.wait([self._task])

    async def until_ended(self, timeout_s: float) -> None:
        """Waits until the stream has ended by itself, but at most `timeout_s`."""
        await asyncio.wait([self._task], timeout=timeout_s)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write())
            reason = await self._read()
            writing.cancel()
        self.drop(reason)
        self._on_lost(reason)

    async def _read(self) -> str:
        """Passes messages on until the stream ends; returns the reason."""
        try:
            async for response in self._call:
                self._on_message()
                self._pass_on(response)
        except grpc.aio.AioRpcError as error:
            return f"the session with it broke: {from_rpc_error(error)}"
        return "it ended the session"

    def _pass_on(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "step":
            receivers = self._receivers
            for token in response.step.tokens:
                if receiver := receivers.get(token.key):
                    receiver.token(token)
        elif kind is not None:
            message = getattr(response, kind)
            released = kind == "released"
            receiver = self._receivers.pop(message.key, None) if released else self._receivers.get(message.key)
            if receiver is not None:
                receiver.receive(message)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over; `_read` gets the reason

    def _check_released(self, key: int) -> None:
        if key in self._receivers:
            log.warning("%s has not released request %d within %.0f s", self._name, key, _RELEASE_TIMEOUT_S)
