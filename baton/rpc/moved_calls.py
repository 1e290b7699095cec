"""Refuses calls by method names of releases before `baton.internal.v1`, which cannot work with this release.

Such a caller gets UNIMPLEMENTED, with the reason and the cure in the detail that those releases read and show.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from baton.core.errors import PeerRefused
from baton.core.version import __version__
from baton.rpc.handlers import Handler
from baton.rpc.status import to_status

_INTERNAL = ("Decode", "Node", "Prefill")
_OPERATIONS = ("ClusterStatus", "ClusterView", "GetLoads", "SwitchNodeRole")


def moved_to(method: str) -> str | None:
    """The present name of `/package.Service/Method`. Returns None if the method has not moved."""
    service, _, name = method.removeprefix("/").rpartition("/")
    if service == "baton.v1.Generation" and name in _OPERATIONS:
        return f"baton.v1.Operations/{name}"
    if service.removeprefix("baton.v1.") in _INTERNAL and service.startswith("baton.v1."):
        return f"baton.internal.v1.{service.removeprefix('baton.v1.')}/{name}"
    return None


class RefuseMovedCalls(grpc.aio.ServerInterceptor):
    """Refuses calls of older releases. It does not identify the caller, because the answer is not a secret."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        now = moved_to(handler_call_details.method)
        if now is None:
            return await continuation(handler_call_details)
        error = PeerRefused(
            f"{handler_call_details.method} is a call of a release before {__version__}, where it is {now}",
            field="release",
            cure="run the same release on both sides; docs/upgrades.md says how to replace a cluster",
        )

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            rich = rpc_status.to_status(to_status(error))
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error), rich.trailing_metadata)
            raise AssertionError("context.abort raises")

        return grpc.stream_stream_rpc_method_handler(refuse)
