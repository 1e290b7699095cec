"""Reads the messages of callers without a credential one at a time, so that they cannot fill a server's memory.

gRPC takes a whole message into memory before it shows the message's size. So a call asks for its message when its turn
has come. Until then, gRPC holds no more of it than flow control lets through. Hosts take turns, so that the calls of
one host delay those of another by one message each.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from baton.core.errors import BatonError, DeadlineExceeded, InvalidRequest, Overloaded
from baton.rpc.handlers import Context, Handler, behavior_of
from baton.rpc.status import abort, too_large
from baton.security.identity import host_of

# Such calls are health checks and questions whether a model is ready, which have one name or two.
_MESSAGE_BYTES_MAX = 4096
_READ_S = 1.0
_WAITING_MAX = 32
_RETRY_AFTER_S = 1.0
_KEY = "send a key, or ask the port of --health-listen"


class ReadTurns:
    """Gives calls turns to read their message, to one host after the other.

    Args:
        read_s: longest time that one turn takes.
        waiting_max: most calls that wait. The newest of the host with most of them is refused first.
    """

    def __init__(self, *, read_s: float = _READ_S, waiting_max: int = _WAITING_MAX) -> None:
        self._read_s = read_s
        self._waiting_max = waiting_max
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by host; the first one is next
        self._taken = False

    async def read(self, messages: AsyncIterator[bytes], context: Context, method: str) -> bytes:
        """Reads the only message of a call. Ends the call if that fails, before the next call gets its turn."""
        try:
            async with self.turn(host_of(context.peer())):
                try:
                    return await self._read(messages, method)
                except BatonError as error:
                    await abort(context, error)
        except Overloaded as error:
            await abort(context, error)

    async def _read(self, messages: AsyncIterator[bytes], method: str) -> bytes:
        """Reads a message.

        Raises:
            DeadlineExceeded: the message did not arrive in time.
            InvalidRequest: the message is too large, or there is none.
        """
        try:
            # NOTE: an open iterator keeps the message until the garbage collector runs.
            async with aclosing(aiter(messages)) as opened, asyncio.timeout(self._read_s):  # type: ignore[type-var]
                message = await anext(opened)
        except TimeoutError:
            late = f"the message of {method} did not arrive within {self._read_s:g} s"
            raise DeadlineExceeded(late, cure=_KEY) from None
        except StopAsyncIteration:
            raise InvalidRequest(f"{method} got no message", field="message", cure="send one") from None
        size_bytes = len(message)
        if size_bytes > _MESSAGE_BYTES_MAX:
            del message  # the error keeps this frame
            raise too_large(size_bytes, method, bytes_max=_MESSAGE_BYTES_MAX)
        return message

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Waits for the host's turn, which lasts until the block ends.

        Raises:
            Overloaded: too many calls wait.
        """
        if self._taken:
            await self._wait(host)
        self._taken = True
        try:
            yield
        finally:
            self._taken = False
            self._wake_next()

    async def _wait(self, host: str) -> None:
        if sum(map(len, self._waiting.values())) >= self._waiting_max:
            self._refuse_one(host)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(host, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self._forget(host, turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # its turn had come
                self._taken = False
                self._wake_next()
            raise

    def _refuse_one(self, host: str) -> None:
        """Makes room for a call from this host.

        Raises:
            Overloaded: no other host has more calls that wait.
        """
        error = Overloaded(
            "too many calls without a key wait to be read",
            cure=_KEY,
            retry_after_s=_RETRY_AFTER_S,
            field="authorization",
        )
        greediest = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[greediest]) <= len(self._waiting.get(host, ())) + 1:
            raise error
        turn = self._waiting[greediest][-1]
        self._forget(greediest, turn)
        turn.set_exception(error)

    def _forget(self, host: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(host, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(host, None)

    def _wake_next(self) -> None:
        if not self._waiting:
            return
        host = next(iter(self._waiting))
        turns = self._waiting.pop(host)
        turn = turns.popleft()
        if turns:
            self._waiting[host] = turns  # behind all other hosts
        self._taken = True
        turn.set_result(None)


def read_in_turn(handler: Any, method: str, turns: ReadTurns) -> Handler:
    """Returns a handler that reads the message when its turn has come. The given one takes a single message as bytes.

    gRPC reads the message of such a handler before it calls it, but a stream only when the handler asks.
    """
    behavior = behavior_of(handler)

    waiting: Any
    if inspect.isasyncgenfunction(behavior):

        async def waiting_generator(messages: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(await turns.read(messages, context, method), context)) as responses:
                async for response in responses:
                    yield response

        waiting = waiting_generator
    else:

        async def waiting_call(messages: AsyncIterator[bytes], context: Context) -> Any:
            return await behavior(await turns.read(messages, context, method), context)

        waiting = waiting_call
    make: Any = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )
    made: Handler = make(waiting, response_serializer=handler.response_serializer)
    return made
