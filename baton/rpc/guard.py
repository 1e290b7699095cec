"""The interceptor that identifies each caller and checks its rights. Handlers run only for callers that have them.

Where keys identify callers, it reads no message of a caller that it refuses, so strangers cannot fill the memory.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, NoReturn, Protocol

import grpc

from baton.core.errors import BatonError, Unauthenticated
from baton.rpc.handlers import Context, Handler, WrapHandlers, behavior_of, with_behavior
from baton.rpc.status import abort
from baton.rpc.unauthenticated import ReadTurns, read_in_turn
from baton.security import authorize
from baton.security.authenticator import Authenticator, bearer
from baton.security.authorize import ALL_RIGHTS, Right
from baton.security.identity import NOBODY, Caller, enter, host_of
from baton.security.roles import Role, role_of

_RIGHTS = {
    Role.GATEWAY: {Right.GATEWAY},
    Role.PREFILL: {Right.PREFILL},
    Role.DECODE: {Right.DECODE},
    Role.NODE: {Right.PREFILL, Right.DECODE},
    Role.OPERATOR: {Right.OPERATOR},
}


Metadata = Iterable[tuple[str, str | bytes]]


class Guard(Protocol):
    """Identifies callers."""

    def caller_by_metadata(self, metadata: Metadata) -> Caller | None:
        """The caller of a call whose message has not been read. None: metadata do not identify callers here.

        Raises:
            Unauthenticated: the metadata have no valid credential.
        """
        ...

    def caller(self, context: Context) -> Caller:
        """The caller of this call.

        Raises:
            Unauthenticated: the caller has not authenticated itself.
        """
        ...


class CertificateGuard:
    """The guard of servers for the cluster's own processes: certificates identify callers."""

    def caller_by_metadata(self, metadata: Metadata) -> Caller | None:  # noqa: ARG002
        return None

    def caller(self, context: Context) -> Caller:
        shown = context.auth_context()
        role = role_of(uri.decode(errors="replace") for uri in shown.get("peer_uri", ()))
        return Caller(f"{role}@{host_of(context.peer())}", frozenset({Right.ANYONE, *_RIGHTS[role]}))


class OpenGuard:
    """The guard of servers without TLS: every caller has all rights.

    Only this machine reaches such a server, unless the operator allowed more.
    """

    def caller_by_metadata(self, metadata: Metadata) -> Caller | None:  # noqa: ARG002
        return None

    def caller(self, context: Context) -> Caller:
        return Caller(host_of(context.peer()), ALL_RIGHTS)


class ClientGuard:
    """The guard of servers for clients: keys identify callers."""

    def __init__(self, door: Authenticator) -> None:
        self._door = door

    def caller_by_metadata(self, metadata: Metadata) -> Caller | None:
        return self._caller(metadata, "") if self._door.locked else None

    def caller(self, context: Context) -> Caller:
        metadata: Any = context.invocation_metadata() or ()
        return self._caller(metadata, host_of(context.peer()))

    def _caller(self, metadata: Metadata, host: str) -> Caller:
        given = [str(value) for key, value in metadata if key == "authorization"]
        if len(given) > 1:
            raise Unauthenticated("the call has several authorizations", field="authorization", cure="send one")
        return self._door.caller(bearer(given[0]) if given else None, host)


class Authorize(WrapHandlers):
    """Refuses calls that the table of rights does not allow, and calls to methods that it does not list."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard
        self._turns = ReadTurns()
        self._in_turn: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler: Any = await super().intercept_service(continuation, handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        needed = authorize.rights_for(method)
        try:
            caller = self._guard.caller_by_metadata(handler_call_details.invocation_metadata or ())
            if caller is not None:
                authorize.check(method, needed, caller.rights)
        except BatonError as error:
            if Right.ANYONE not in needed:
                return _refusing(error)
            if not handler.request_streaming:
                if method not in self._in_turn:
                    self._in_turn[method] = read_in_turn(handler, method, self._turns)
                return self._in_turn[method]
        return handler  # type: ignore[no-any-return]

    def wrap(self, handler: Any, method: str) -> Handler:
        return _admitted(handler, self._admission(method))

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


def _refusing(error: BatonError) -> Handler:
    """Ends a call without reading its message. gRPC reads one of a stream only when the handler asks for it."""

    async def refuse(_: Any, context: Context) -> NoReturn:
        await abort(context, error)

    made: Handler = grpc.stream_stream_rpc_method_handler(refuse)
    return made


def _admitted(handler: Any, admit: Callable[[Context], Awaitable[None]]) -> Handler:
    """Runs `admit` before the handler. A single message is parsed after it, a stream's when the handler reads it."""
    behavior = behavior_of(handler)
    streams, parse = handler.request_streaming, handler.request_deserializer

    def read(request: Any) -> Any:
        return request if streams or parse is None else parse(request)

    guarded: Any
    if inspect.isasyncgenfunction(behavior):

        async def guarded_generator(request: Any, context: Context) -> AsyncIterator[Any]:
            await admit(context)
            answering = behavior(read(request), context)
            del request  # as in `baton.rpc.malformed`
            async with aclosing(answering) as responses:
                async for response in responses:
                    yield response

        guarded = guarded_generator
    else:

        async def guarded_call(request: Any, context: Context) -> Any:
            await admit(context)
            answering = behavior(read(request), context)
            del request
            return await answering

        guarded = guarded_call
    return with_behavior(handler, guarded, parse=parse if streams else None)
