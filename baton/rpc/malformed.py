"""Ends every failed call of a server with a status of ours, whatever its handler raises.

A message that cannot be parsed or is too large gets INVALID_ARGUMENT. gRPC parses messages before it calls the handler,
and would answer UNKNOWN; here the parser returns a `_Malformed` instead of failing, and the wrapped handler ends the
call. A `BatonError` of a handler becomes its status; any other exception is logged and becomes INTERNAL.

gRPC keeps a call's error, and all frames that it has passed, in a cycle of objects until the collector runs. So that
they keep no large request alive, finished frames are cleared, and frames here drop the request.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from baton.core.errors import BatonError, DeadlineExceeded, InternalError, InvalidRequest
from baton.rpc.handlers import Context, Handler, WrapHandlers, behavior_of, with_behavior
from baton.rpc.status import abort, too_large

log = logging.getLogger("baton")

_WRITE_ENDS_S = 0.05
_FIELDS_MAX = 1 << 14
_NUMBERS_MAX = 1 << 19  # token ids; an HTTP body may have as many values


@dataclass(frozen=True)
class _Malformed:
    """Stands for a message that was not parsed.

    Args:
        bytes_max: the limit that the message exceeds; None if it is not too large.
        why: the other reason not to parse it.
    """

    size_bytes: int
    bytes_max: int | None = None
    why: str = "cannot be parsed"


class RefuseMalformed(WrapHandlers):
    """Gives each call a status of ours.

    Args:
        bytes_max: largest message.
        bounded: messages with more fields than a client's request needs count as malformed, and are not parsed.
    """

    def __init__(self, bytes_max: int, *, bounded: bool = False) -> None:
        super().__init__()
        self._bytes_max = bytes_max
        self._bounded = bounded

    def wrap(self, handler: Any, method: str) -> Handler:
        parse = handler.request_deserializer
        if parse is None:
            return handler  # type: ignore[no-any-return]  # takes any bytes

        descriptor = parse.__self__.DESCRIPTOR if self._bounded else None

        def parse_or_mark(data: bytes) -> Any:
            if len(data) > self._bytes_max:
                return _Malformed(len(data), self._bytes_max)
            if descriptor is not None and is_too_much(
                data, descriptor, fields_max=_FIELDS_MAX, numbers_max=_NUMBERS_MAX
            ):
                why = f"has more than {_FIELDS_MAX} fields or {_NUMBERS_MAX} token ids"
                return _Malformed(len(data), why=why)
            try:
                return parse(data)
            except Exception:  # noqa: BLE001  any error of a parser means that the bytes are wrong
                return _Malformed(len(data))

        guard = _guard_stream if handler.request_streaming else _guard_message
        return with_behavior(handler, guard(behavior_of(handler), method), parse=parse_or_mark)


def _guard_message(behavior: Any, method: str) -> Any:
    """Wraps the handler of calls with one message. The wrapper is a generator if the handler answers with a stream."""
    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:
            async with _ending_with_status(context, method):
                _check(request, method)
                answering = behavior(request, context)
                del request
                async with aclosing(answering) as responses:
                    async for response in responses:
                        yield response

        return guarded_generator

    async def guarded(request: Any, context: Context) -> Any:
        async with _ending_with_status(context, method):
            _check(request, method)
            answering = behavior(request, context)
            del request
            return await answering

    return guarded


def _guard_stream(behavior: Any, method: str) -> Any:
    """Wraps the handler of calls with a stream of messages."""

    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with _ending_with_status(context, method):
                messages = _Messages(requests, method)
                async with messages.all_parsed(), aclosing(behavior(messages.iterate(), context)) as responses:
                    async for response in responses:
                        yield response

        return guarded_generator

    async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
        async with _ending_with_status(context, method):
            messages = _Messages(requests, method)
            async with messages.all_parsed():
                return await behavior(messages.iterate(), context)

    return guarded


class _Messages:
    """A call's messages up to the first that cannot be parsed. For the handler the stream ends there, so that it
    finishes its writes, with which the error's status would collide."""

    def __init__(self, requests: AsyncIterator[Any], method: str) -> None:
        self._requests = requests
        self._method = method
        self._malformed: _Malformed | None = None

    async def iterate(self) -> AsyncIterator[Any]:
        is_first = True
        async for request in self._requests:
            if isinstance(request, _Malformed):
                self._malformed = request
                if is_first:  # nothing is being written yet
                    _check(request, self._method)
                return
            is_first = False
            yield request

    @asynccontextmanager
    async def all_parsed(self) -> AsyncIterator[None]:
        """Raises InvalidRequest at the end if a message could not be parsed and the handler has not ended the call."""
        try:
            yield
        except Exception as error:  # the handler may have failed because messages are missing
            if not any(isinstance(cause, grpc.aio.AbortError) for cause in _leaves(error)):
                _check(self._malformed, self._method)
            raise
        _check(self._malformed, self._method)


@asynccontextmanager
async def _ending_with_status(context: Context, method: str) -> AsyncIterator[None]:
    """Ends the call with a status of ours if the handler inside fails."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  gRPC would answer UNKNOWN
        clear_frames(error.__traceback__)
        causes = list(_leaves(error))
        # In these cases the call has ended: by `abort`, maybe in a task of the handler, or because the client left.
        for cause in causes:
            if isinstance(cause, grpc.aio.AbortError):
                raise cause from None
        if all(isinstance(cause, grpc.aio.InternalError) for cause in causes):
            raise asyncio.CancelledError from None
        if isinstance(error, BaseExceptionGroup):
            # NOTE: a task's failure cancels the handler's write, which gRPC finishes a moment later. A status sent
            # before that would collide with it, and the client would never get one.
            await asyncio.sleep(_WRITE_ENDS_S)
        await abort(context, _error_of(causes, error, method))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def _error_of(causes: list[BaseException], error: Exception, method: str) -> BatonError:
    for cause in causes:
        if isinstance(cause, BatonError):
            return cause
    if isinstance(causes[0], TimeoutError):
        return DeadlineExceeded(f"{method} did not get the next message in time", cure="try again")
    if isinstance(causes[0], StopAsyncIteration):
        cure = "send all messages that the method waits for"
        return InvalidRequest(f"the stream of {method} ended before the next message", field="message", cure=cure)
    log.error("%s failed", method, exc_info=error)
    return InternalError(f"{method} failed: {type(causes[0]).__name__}: {causes[0]}", cure="see the server's log")


def _check(request: Any, method: str) -> None:
    """Raises InvalidRequest if the message could not be parsed or is too large."""
    if isinstance(request, _Malformed):
        if request.bytes_max is not None:
            raise too_large(request.size_bytes, method, bytes_max=request.bytes_max)
        message = f"the message of {request.size_bytes} bytes for {method} {request.why}"
        cure = "send the protobuf message that the method takes; reflection describes it"
        raise InvalidRequest(message, field="message", cure=cure)


# Fields are counted before a message is parsed: the parser runs on the event loop and takes seconds for 32 MiB of
# empty messages, which are two bytes each.
_SMALL_BYTES = 1 << 16  # such messages are parsed within milliseconds, whatever they contain
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_VARINT_BYTES_MAX = 10
_NUMBER_BYTES_MAX = 5  # of a packed number, as token ids are


def is_too_much(data: bytes, descriptor: Any, *, fields_max: int, numbers_max: int) -> bool:
    """Whether the message, with the messages inside it, has more than `fields_max` fields or `numbers_max` numbers.

    Also True if a field reaches beyond its message, because nothing after it can be counted.

    Args:
        descriptor: of the message's type.
    """
    if len(data) <= _SMALL_BYTES:
        return False
    fields_left, number_bytes_left = fields_max, _NUMBER_BYTES_MAX * numbers_max
    waiting = [(0, len(data), descriptor)]
    while waiting:
        place, end, of = waiting.pop()
        while place < end:
            fields_left -= 1
            if fields_left < 0:
                return True
            key, place = _varint(data, place)
            field = of.fields_by_number.get(key >> 3)
            match key & 7:
                case 0:
                    _, place = _varint(data, place)
                case 1:
                    place += 8
                case 5:
                    place += 4
                case 2:
                    size, place = _varint(data, place)
                    if field is not None and field.message_type is not None:
                        waiting.append((place, place + size, field.message_type))
                    elif field is not None and field.is_repeated and field.type not in _TEXTS:
                        number_bytes_left -= size
                    place += size
                case _:
                    return True  # groups, which no message of ours has
            if place > end or number_bytes_left < 0:
                return True
    return False


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """The number at this place, and the place after it, which is beyond the end if the number is cut off."""
    value = shift = 0
    for byte in data[place : place + _VARINT_BYTES_MAX]:
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    return value, len(data) + 1
