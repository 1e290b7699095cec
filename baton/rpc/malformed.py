"""A message that cannot be parsed gets INVALID_ARGUMENT with our detail, on every service of a server.

gRPC parses a message before it calls the handler, and answers UNKNOWN with a traceback in the log where that fails.
Here the parser returns a `_Malformed` instead of failing, and the wrapped handler ends the call.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from baton.errors import InvalidRequest
from baton.rpc.status import abort

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time


@dataclass(frozen=True)
class _Malformed:
    """Takes the place of a message that cannot be parsed."""

    size_bytes: int


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None:
            return known
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # an unknown method
        wrapped = self._wrapped[method] = _wrap(handler, method)
        return wrapped


def _wrap(handler: Any, method: str) -> Handler:
    parse = handler.request_deserializer
    if parse is None:
        return handler  # type: ignore[no-any-return]  # takes any bytes

    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _Malformed(len(data))

    if handler.request_streaming:
        behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary
        guarded = _guard_stream(behavior, method)
    else:
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        guarded = _guard_message(behavior, method)
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    wrapped: Handler = make(
        guarded, request_deserializer=parse_or_mark, response_serializer=handler.response_serializer
    )
    return wrapped


def _guard_message(behavior: Any, method: str) -> Any:
    """The handler, for calls with one message. It is a generator where it answers with a stream."""
    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:
            if isinstance(request, _Malformed):
                await _refuse(request, context, method)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return guarded_generator

    async def guarded(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(request, context, method)
        return await behavior(request, context)

    return guarded


def _guard_stream(behavior: Any, method: str) -> Any:
    """The handler, for calls with a stream of messages."""

    async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if isinstance(request, _Malformed):
                await _refuse(request, context, method)
            yield request

    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior(checked(requests, context), context)) as responses:
                async for response in responses:
                    yield response

        return guarded_generator

    async def guarded(requests: AsyncIterator[Any], context: Context) -> Any:
        return await behavior(checked(requests, context), context)

    return guarded


async def _refuse(malformed: _Malformed, context: Context, method: str) -> None:
    message = f"the message of {malformed.size_bytes} bytes for {method} cannot be parsed"
    cure = "send the protobuf message that the method takes; reflection describes it"
    await abort(context, InvalidRequest(message, field="message", cure=cure))
