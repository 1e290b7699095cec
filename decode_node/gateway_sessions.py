"""The gateways' Session streams: reads each gateway's messages, and queues the messages to it.

Steps that wait in a queue are merged into one message, because a message costs a gateway more than its tokens.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from baton.protos.internal.v1 import decode_pb2 as pb
from decode_node.events import Event, SessionClosed, SessionMessage, SessionOpened

log = logging.getLogger("baton")

# A gateway that leaves this many messages unread gets nothing more. Its stream ends once it reads them.
_OUTBOX_MAX = 20_000
_STEP_TOKENS_MAX = 4096  # of several steps in one message


@dataclass(eq=False)
class _Queued:
    """A message, and the number of messages that were merged into it."""

    message: pb.SessionResponse
    count: int = 1


@dataclass(eq=False)
class _Stream:
    """The queued messages to one gateway; None ends the stream.

    Attributes:
        unread: messages in the outbox, counted before merging.
        last_step: the last message in the outbox, if it is a step.
    """

    gateway: str
    outbox: asyncio.Queue[_Queued | None] = field(default_factory=asyncio.Queue)
    unread: int = 0
    last_step: _Queued | None = None
    ended: bool = False

    def put(self, message: pb.SessionResponse) -> None:
        self.unread += 1
        last, is_step = self.last_step, message.HasField("step")
        if is_step and last is not None and len(last.message.step.tokens) < _STEP_TOKENS_MAX:
            last.message.step.MergeFrom(message.step)
            last.count += 1
            return
        queued = _Queued(message)
        self.outbox.put_nowait(queued)
        self.last_step = queued if is_step else None

    async def get(self) -> pb.SessionResponse | None:
        queued = await self.outbox.get()
        if queued is None:
            return None
        self.unread -= queued.count
        if queued is self.last_step:
            self.last_step = None
        return queued.message

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.outbox.put_nowait(None)


class GatewaySessions:
    """All Session streams of this node, by number. No number is used twice.

    Args:
        deliver: receives the events of all streams, in order.
        numbers: of the streams.
    """

    def __init__(self, deliver: Callable[[Event], None], numbers: Iterator[int]) -> None:
        self._deliver = deliver
        self._numbers = numbers
        self._streams: dict[int, _Stream] = {}

    async def serve(
        self,
        gateway: str,
        incoming: AsyncIterator[pb.SessionRequest],
        write: Callable[[pb.SessionResponse], Awaitable[None]],
    ) -> None:
        """Runs one gateway's stream, until the gateway closes it, it breaks, or `end` is called."""
        number = next(self._numbers)
        stream = self._streams[number] = _Stream(gateway)
        self._deliver(SessionOpened(number))
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(self._read(number, stream, incoming), name=f"session-{number}")
                while (message := await stream.get()) is not None:
                    await write(message)
                reader.cancel()
        finally:
            del self._streams[number]
            self._deliver(SessionClosed(number))

    def send(self, session: int, message: pb.SessionResponse) -> None:
        """Queues a message. Drops it if the session is gone or ended."""
        stream = self._streams.get(session)
        if stream is None or stream.ended:
            return
        stream.put(message)
        if stream.unread > _OUTBOX_MAX:
            log.warning("gateway %s has not read %d messages: its session ends", stream.gateway, stream.unread)
            stream.end()

    def end(self, session: int) -> None:
        """Ends a stream once everything queued has been written."""
        if stream := self._streams.get(session):
            stream.end()

    async def _read(self, number: int, stream: _Stream, incoming: AsyncIterator[pb.SessionRequest]) -> None:
        try:
            async for request in incoming:
                self._deliver(SessionMessage(number, request))
        finally:
            stream.end()
