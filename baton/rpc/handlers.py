"""Wraps a server's handlers, whether request and response are single messages or streams."""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time


class WrapHandlers(grpc.aio.ServerInterceptor):
    """Wraps each method's handler once."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Handler] = {}

    @abstractmethod
    def wrap(self, handler: Any, method: str) -> Handler:
        """The handler that replaces the one of `/package.Service/Method`."""

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
        wrapped = self._wrapped[method] = self.wrap(handler, method)
        return wrapped


def behavior_of(handler: Any) -> Any:
    """The function that serves a handler's calls."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def with_behavior(handler: Any, behavior: Any, *, parse: Callable[[bytes], Any] | None) -> Handler:
    """A copy of a handler with another function and another parser of requests; without a parser it takes bytes."""
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    made: Handler = make(behavior, request_deserializer=parse, response_serializer=handler.response_serializer)
    return made
