"""One gateway's Session stream: its requests, and one message per engine step with the tokens of all of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from baton.convert import finish_reason_to_proto, token_to_proto
from engine.events import TokenSampled
from protos.baton.v1 import decode_pb2 as pb

if TYPE_CHECKING:
    from decode_node.node import DecodeNode

log = logging.getLogger("baton")

# A gateway that reads nothing while this many messages wait is as good as dead.
_OUTBOX_MAX = 20_000


class Session:
    """The sending side of one gateway's stream. Every method only queues; nothing here waits."""

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self._outbox: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._step: pb.Step | None = None

    def send(self, response: pb.SessionResponse) -> None:
        """Queues a message behind the tokens that came before it."""
        self.flush_step()
        self._outbox.put_nowait(response)
        if self._outbox.qsize() > _OUTBOX_MAX:
            log.warning("gateway %s reads nothing: its session is closed", self.peer)
            self.close()

    def add_token(self, key: int, sampled: TokenSampled, *, prefill_s: float | None) -> None:
        """Puts a token into this engine step's message; prefill_s with the first token of a local prefill."""
        if self._step is None:
            self._step = pb.Step()
        self._step.tokens.append(
            pb.StepToken(
                key=key,
                token=token_to_proto(sampled.token),
                finish_reason=finish_reason_to_proto(sampled.finish_reason),
                stop_reason=sampled.stop_reason,
                prefill_s=prefill_s,
            )
        )

    def flush_step(self) -> None:
        """Queues this engine step's message, if any request of this gateway got a token."""
        if self._step is not None:
            step, self._step = self._step, None
            self._outbox.put_nowait(pb.SessionResponse(step=step))

    def close(self) -> None:
        """Ends the stream once what is queued has been written."""
        self._outbox.put_nowait(None)

    async def responses(self) -> AsyncIterator[pb.SessionResponse]:
        while (response := await self._outbox.get()) is not None:
            yield response


async def serve_session(
    session: Session,
    incoming: AsyncIterator[pb.SessionRequest],
    write: Callable[[pb.SessionResponse], Awaitable[None]],
    node: "DecodeNode",
) -> None:
    """Runs one gateway's stream; when it breaks, for whatever reason, ends and releases all that was held for it."""
    reader = asyncio.create_task(_read(session, incoming, node), name=f"session-{session.number}")
    try:
        async for response in session.responses():
            await write(response)
    finally:
        reader.cancel()
        await node.end_session(session)
        await asyncio.wait([reader])


async def _read(session: Session, incoming: AsyncIterator[pb.SessionRequest], node: "DecodeNode") -> None:
    try:
        async for request in incoming:
            match request.WhichOneof("message"):
                case "submit":
                    node.submit(session, request.submit)
                case "renew":
                    node.renew(session, request.renew)
                case "here":
                    node.prefill_here(session, request.here)
                case "cancel":
                    node.cancel(session, request.cancel.key)
    finally:
        session.close()
