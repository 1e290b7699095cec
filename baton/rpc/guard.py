"""The interceptor that identifies each caller and checks its rights. Handlers run only for callers that have them."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

from baton.core.errors import BatonError, Unauthenticated
from baton.rpc.handlers import Context, Handler, WrapHandlers, behavior_of, with_behavior
from baton.rpc.status import abort
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


class Guard(Protocol):
    """Identifies callers."""

    def caller(self, context: Context) -> Caller:
        """The caller of this call.

        Raises:
            Unauthenticated: the caller has not authenticated itself.
        """
        ...


class CertificateGuard:
    """The guard of servers for the cluster's own processes: certificates identify callers."""

    def caller(self, context: Context) -> Caller:
        shown = context.auth_context()
        role = role_of(uri.decode(errors="replace") for uri in shown.get("peer_uri", ()))
        return Caller(f"{role}@{host_of(context.peer())}", frozenset({Right.ANYONE, *_RIGHTS[role]}))


class OpenGuard:
    """The guard of servers without TLS: every caller has all rights.

    Only this machine reaches such a server, unless the operator allowed more.
    """

    def caller(self, context: Context) -> Caller:
        return Caller(host_of(context.peer()), ALL_RIGHTS)


class ClientGuard:
    """The guard of servers for clients: keys identify callers."""

    def __init__(self, door: Authenticator) -> None:
        self._door = door

    def caller(self, context: Context) -> Caller:
        given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(given) > 1:
            raise Unauthenticated("the call has several authorizations", field="authorization", cure="send one")
        return self._door.caller(bearer(given[0]) if given else None, host_of(context.peer()))


class Authorize(WrapHandlers):
    """Refuses calls that the table of rights does not allow, and calls to methods that it does not list."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

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
