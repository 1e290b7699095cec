"""The interceptor that finds out who calls and asks the table whether that caller may. Handlers run only if so."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import grpc

from baton.errors import BatonError, Unauthenticated
from baton.rpc.status import abort
from baton.security import authorize
from baton.security.authorize import ALL_RIGHTS, Right
from baton.security.door import Door, bearer
from baton.security.identity import NOBODY, Caller, enter, host_of
from baton.security.roles import Role, role_of

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time

_RIGHTS = {
    Role.GATEWAY: Right.GATEWAY,
    Role.PREFILL: Right.PREFILL,
    Role.DECODE: Right.DECODE,
    Role.OPERATOR: Right.OPERATOR,
}


class Guard(Protocol):
    """Knows callers."""

    def caller(self, context: Context) -> Caller:
        """Who makes this call.

        Raises:
            Unauthenticated: it has not shown that.
        """
        ...


class CertificateGuard:
    """Of servers for the cluster's own processes: the caller is what its certificate says."""

    def caller(self, context: Context) -> Caller:
        shown = context.auth_context()
        role = role_of(uri.decode(errors="replace") for uri in shown.get("peer_uri", ()))
        return Caller(f"{role}@{host_of(context.peer())}", frozenset({Right.ANYONE, _RIGHTS[role]}))


class OpenGuard:
    """Of servers without TLS, which only this machine reaches unless the operator said otherwise."""

    def caller(self, context: Context) -> Caller:
        return Caller(host_of(context.peer()), ALL_RIGHTS)


class DoorGuard:
    """Of servers for clients: the caller is whom its key belongs to."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def caller(self, context: Context) -> Caller:
        given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(given) > 1:
            raise Unauthenticated("the call has several authorizations", field="authorization", cure="send one")
        return self._door.caller(bearer(given[0]) if given else None, host_of(context.peer()))


class Authorize(grpc.aio.ServerInterceptor):
    """Refuses calls that the table does not allow, also of RPCs that it does not have. Wraps each handler once."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
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
        wrapped = self._wrapped[method] = _wrap(handler, self._admission(method))
        return wrapped

    def _admission(self, method: str) -> Callable[[Context], Awaitable[None]]:
        needed = authorize.rights_for(method)

        async def admit(context: Context) -> None:
            if Right.ANYONE in needed:
                enter(NOBODY)
                return
            try:
                caller = self._guard.caller(context)
                authorize.check(method, needed, caller.rights)
            except BatonError as error:
                await abort(context, error)
            enter(caller)

        return admit


def _wrap(handler: Any, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """The handler after `admit`. A single message is parsed only then, a stream's when the handler reads it."""
    streams = handler.request_streaming
    if streams:
        behavior = handler.stream_stream if handler.response_streaming else handler.stream_unary
    else:
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
    parse = None if streams else handler.request_deserializer

    guarded: Any
    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:
            await admit(context)
            message = request if parse is None else parse(request)
            async with aclosing(behavior(message, context)) as responses:
                async for response in responses:
                    yield response

        guarded = guarded_generator
    else:

        async def guarded_call(request: Any, context: Context) -> Any:
            await admit(context)
            return await behavior(request if parse is None else parse(request), context)

        guarded = guarded_call
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[streams, handler.response_streaming]
    wrapped: Handler = make(
        guarded,
        request_deserializer=handler.request_deserializer if streams else None,
        response_serializer=handler.response_serializer,
    )
    return wrapped
