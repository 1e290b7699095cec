"""One gateway's stream with one decode node: all requests of this gateway on that node, told apart by key.

Owns the keys: a key is never used twice, and is forgotten with the node's `Released`, which is its last message. Knows
no hand-over: what comes for a key goes to whoever submitted it.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from baton.rpc.status import from_rpc_error
from protos.baton.v1 import decode_pb2 as pb

log = logging.getLogger("baton")

_RELEASE_TIMEOUT_S = 30.0

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@dataclass(frozen=True)
class SessionLost:
    """The stream is broken; the node has released, or will release, all that it held for it."""

    reason: str


Said = (
    pb.StepToken | pb.Reserved | pb.Accepted | pb.Admitted | pb.HandOverFailed | pb.Failed | pb.Released | SessionLost
)
Hear = Callable[[Said], None]


class Session:
    """The stream, from its call to its end. Must be made on the event loop; `close` ends it.

    Args:
        on_heard: called at every message, as a sign of life.
        on_lost: called once with the reason when the stream breaks by itself.
    """

    def __init__(
        self, call: Call, *, name: str, on_heard: Callable[[], None], on_lost: Callable[["Session", str], None]
    ) -> None:
        self.open = True
        self._call = call
        self._name = name
        self._on_heard = on_heard
        self._on_lost = on_lost
        self._keys = itertools.count(1)
        self._hearers: dict[int, Hear | None] = {}  # None: nobody listens any more, `Released` is awaited
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read(), name=f"session-read-{name}")
        self._writer = asyncio.create_task(self._write(), name=f"session-write-{name}")

    @property
    def held(self) -> int:
        """Requests for which the node still holds something."""
        return len(self._hearers)

    def submit(self, request: pb.SubmitRequest, hear: Hear) -> "Line":
        """Sends the request under a new key; `hear` gets all that the node says about it, until the line is closed."""
        key = next(self._keys)
        request.key = key
        if self.open:
            self._hearers[key] = hear
            self.send(pb.SessionRequest(submit=request))
        else:
            hear(SessionLost("its session is closed"))
        return Line(self, key)

    def send(self, message: pb.SessionRequest) -> None:
        self._outbox.put_nowait(message)

    def end(self, key: int, *, cancel: bool) -> None:
        """Nobody listens for this key any more; with `cancel` the node is told so. The second time does nothing."""
        if self._hearers.get(key) is None:
            return
        self._hearers[key] = None
        if cancel:
            self.send(pb.SessionRequest(cancel=pb.CancelRequest(key=key)))
        asyncio.get_running_loop().call_later(_RELEASE_TIMEOUT_S, self._check_released, key)

    async def close(self, reason: str = "the gateway closed it") -> None:
        """Ends the stream, and so all that the node holds for it."""
        self.lose(reason)
        await asyncio.wait([self._reader, self._writer])

    def lose(self, reason: str) -> None:
        """Gives the stream up; everybody who still listens hears of it. Does nothing the second time."""
        if not self.open:
            return
        self.open = False
        self._reader.cancel()
        self._writer.cancel()
        self._call.cancel()
        hearers = [hear for hear in self._hearers.values() if hear is not None]
        self._hearers.clear()
        for hear in hearers:
            hear(SessionLost(reason))

    async def _read(self) -> None:
        reason = "it ended the session"
        try:
            async for response in self._call:
                self._on_heard()
                self._pass_on(response)
        except grpc.aio.AioRpcError as error:
            reason = f"the session with it broke: {from_rpc_error(error)}"
        if self.open:
            self.lose(reason)
            self._on_lost(self, reason)

    def _pass_on(self, response: pb.SessionResponse) -> None:
        kind = response.WhichOneof("message")
        if kind == "step":
            hearers = self._hearers
            for token in response.step.tokens:
                if hear := hearers.get(token.key):
                    hear(token)
        elif kind is not None:
            message = getattr(response, kind)
            hear = self._hearers.pop(message.key, None) if kind == "released" else self._hearers.get(message.key)
            if hear is not None:
                hear(message)

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over: the reader learns why

    def _check_released(self, key: int) -> None:
        if self._hearers.get(key, self) is None:
            log.warning("%s has not released request %d within %.0f s", self._name, key, _RELEASE_TIMEOUT_S)


class Line:
    """One request's place in a session."""

    def __init__(self, session: Session, key: int) -> None:
        self._session = session
        self._key = key

    def renew(self, failed_lease: int, output: Sequence[int]) -> None:
        """Asks for a new ticket in place of one whose hand-over failed."""
        renew = pb.RenewTicket(key=self._key, failed_lease=failed_lease, output_token_ids=output)
        self._session.send(pb.SessionRequest(renew=renew))

    def prefill_here(self, failed_lease: int, output: Sequence[int]) -> None:
        """Asks the decode node to prefill the request itself."""
        here = pb.PrefillHere(key=self._key, failed_lease=failed_lease, output_token_ids=output)
        self._session.send(pb.SessionRequest(here=here))

    def close(self, *, cancel: bool) -> None:
        """Hears no more; `cancel` unless the node has ended the request itself."""
        self._session.end(self._key, cancel=cancel)
