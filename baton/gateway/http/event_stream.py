"""Sends an answer as server-sent events of any API, and cancels the request if its client leaves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.core.errors import BatonError, InternalError
from baton.core.log_lines import loggable
from baton.gateway.http.errors import ErrorShape, error_response
from baton.gateway.serving.output_run import Skip
from baton.gateway.text.chat.types import ChatRequest
from baton.protos.v1 import generation_pb2 as pb

KEEP_ALIVE_S = 10.0  # a comment is sent after a silence of between once and twice this time
RAW_SEND = "baton.send"  # key in a request's scope of the server's own `send`, without the frameworks' wrappers
_EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}

log = logging.getLogger("baton")


class ClientLeft(Exception):
    """The client closed its connection before the answer ended."""


class ResponseEncoder(Protocol):
    """Encodes one stream as an API's own events."""

    def push(self, message: pb.GenerateResponse) -> bytes:
        """Returns the events for a message that is not a notice; may be empty."""
        ...

    def finish(self) -> bytes:
        """Returns the events after the last message."""
        ...

    def error(self, error: BatonError) -> bytes:
        """Returns the event that ends a failed stream."""
        ...


class ChatEncoder(ResponseEncoder, Protocol):
    """Encodes the stream of a chat."""

    def skip(self, message: pb.GenerateResponse) -> None:
        """Takes a message whose events the client already has, before those that it still gets."""
        ...


@dataclass(frozen=True)
class HttpJob:
    """One call of `Serving.generate`.

    Attributes:
        push: takes each message, and returns its events.
        skip: takes the messages that the client already has, before the others.
    """

    message: pb.GenerateRequest
    push: Callable[[pb.GenerateResponse], bytes]
    chat: ChatRequest | None = None
    skip: Skip | None = None


WriteFor = Callable[[HttpJob], Callable[[pb.GenerateResponse], Awaitable[None]]]


class EventStream(Response):
    """Runs a request, and streams its answer.

    An error before the first event is answered with its own HTTP status; a later one becomes an event.

    Args:
        as_events: errors that become events in any case, because the API's clients look for them there.
    """

    def __init__(
        self,
        request_id: str,
        generate: Callable[[WriteFor], Awaitable[None]],
        encoder: ResponseEncoder,
        in_own_words: Callable[[BatonError], BatonError],
        error_shape: ErrorShape,
        as_events: type[BatonError] | tuple[()] = (),
    ) -> None:
        super().__init__(headers={**_EVENT_STREAM, "x-request-id": request_id})
        del self.headers["content-length"]
        self._request_id = request_id
        self._generate = generate
        self._encoder = encoder
        self._in_own_words, self._error_shape = in_own_words, error_shape
        self._as_events = as_events
        self._started = False
        self._writing = False  # while an event waits for a slow client
        self._written = True  # since the last `_keep_alive`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_start = send
        self._send = scope.get(RAW_SEND, send)
        generation = asyncio.create_task(self._run(scope, receive, send))
        try:
            await unless_left(generation, receive, every_s=KEEP_ALIVE_S, act=self._keep_alive)
        except ClientLeft:
            log.debug("%s: the client disconnected", self._request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._generate(self._write_for)
            await self._write(self._encoder.finish(), more=False)
        except BatonError as error:
            await self._fail(self._in_own_words(error), scope, receive, send)
        except Exception as error:
            log.exception("request %s failed", self._request_id)
            internal = InternalError(f"{type(error).__name__} in the gateway", cure="see the gateway's log")
            await self._fail(internal, scope, receive, send)

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
        log_answer(self._request_id, error)
        if self._started or isinstance(error, self._as_events):
            await self._write(self._encoder.error(error), more=False)
        else:
            self._started = True
            await error_response(error, self._request_id, self._error_shape)(scope, receive, send)

    def _write_for(self, job: HttpJob) -> Callable[[pb.GenerateResponse], Awaitable[None]]:
        push, send = job.push, self._send

        async def write(message: pb.GenerateResponse) -> None:
            data = comment(message.notice) if message.notice else push(message)
            if not data:
                return
            if not self._started:
                await self._write(data)
                return
            self._writing = self._written = True  # `_write` inlined, because this runs once per token
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._writing = False

        return write

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await self._send_start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._writing = self._written = True
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self._writing = False

    async def _keep_alive(self) -> None:
        if not self._written and not self._writing:
            await self._write(comment("keep-alive"))
        self._written = False


def comment(text: str) -> bytes:
    """Returns a comment, which clients of event streams ignore."""
    return f": {' '.join(text.split())}\n\n".encode()


def log_answer(request_id: str, error: BatonError) -> None:
    """Logs an error that is answered. Only for debugging, because `baton.gateway.serving` logs failed requests."""
    log.debug("%s: %s", request_id, loggable(error))


async def unless_left(
    work: "asyncio.Task[None]",
    receive: Receive,
    *,
    every_s: float | None = None,
    act: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Waits for the task, and cancels it when the client closes its connection. Call it once the body is read.

    Args:
        every_s, act: call `act` at this interval while waiting.

    Raises:
        ClientLeft: the client closed its connection.
    """
    leaving = asyncio.create_task(_left(receive))
    try:
        while True:
            done, _ = await asyncio.wait((work, leaving), timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return await work
            if leaving in done:
                raise ClientLeft
            if act is not None:
                await act()
    finally:
        work.cancel()
        leaving.cancel()
        await asyncio.wait((work, leaving))


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
