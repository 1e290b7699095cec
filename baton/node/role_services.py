"""The Prefill and Decode services of a node's server, which pass every call on to the node's present role.

A gRPC server accepts no services once it has started, so it has both from the start, before the model is loaded. A
role's calls end with the role.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import grpc

from baton.core.errors import Draining
from baton.protos.internal.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2

PREFILL, DECODE = "baton.internal.v1.Prefill", "baton.internal.v1.Decode"
Context = grpc.aio.ServicerContext[Any, Any]


class RoleServices(prefill_pb2_grpc.PrefillServicer, decode_pb2_grpc.DecodeServicer):
    """Both services. Calls to a service that the present role does not have are refused with `Draining`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._servicers: Mapping[str, Any] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    def serve(self, name: str, servicers: Mapping[str, object]) -> None:
        """Passes calls on to these servicers, by the names of their services.

        Args:
            name: of the node, for errors.
        """
        self._name, self._servicers = name, servicers

    def refuse(self) -> None:
        """Refuses all calls from now on; running calls continue."""
        self._servicers = {}

    async def end(self) -> None:
        """Ends the calls that still run, after `refuse`; returns when they have ended."""
        while calls := tuple(self._calls):
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)

    async def Prefill(  # type: ignore[override]  # the stubs know generators only
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> None:
        await self._run(self._servicer(PREFILL).Prefill(request, context))

    async def Connect(self, request: prefill_pb2.ConnectRequest, context: Context) -> node_status_pb2.PeerState:
        state: node_status_pb2.PeerState = await self._run(self._servicer(PREFILL).Connect(request, context))
        return state

    async def Pool(self, request: prefill_pb2.PoolRequest, context: Context) -> prefill_pb2.PoolResponse:
        response: prefill_pb2.PoolResponse = await self._run(self._servicer(PREFILL).Pool(request, context))
        return response

    async def Session(  # type: ignore[override]  # the stubs know generators only
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Context
    ) -> None:
        await self._run(self._servicer(DECODE).Session(request_iterator, context))

    async def Pair(  # type: ignore[override]  # the stubs know generators only
        self, request_iterator: AsyncIterator[decode_pb2.PairRequest], context: Context
    ) -> None:
        await self._run(self._servicer(DECODE).Pair(request_iterator, context))

    def _servicer(self, service: str) -> Any:
        if (servicer := self._servicers.get(service)) is None:
            raise Draining(f"{self._name} does not serve {service} now", cure="ask another node, see `baton status`")
        return servicer

    async def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Runs a call in its own task, so that `end` and gRPC can both cancel it. The caller then gets an error."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not self._servicers:
                raise Draining(f"{self._name} changes its role", cure="ask another node") from None
            task.cancel()
            await asyncio.wait([task])
            raise
