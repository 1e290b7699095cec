"""The Node service: describe, watch, watch the cache, drain, switch the role, adapters, experts. Messages come
ready-made."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc

from baton.convert import adapter_to_proto
from baton.types import AdapterRef
from node.cache_events import CacheEvents
from protos.baton.v1 import node_pb2 as pb
from protos.baton.v1 import node_pb2_grpc

SERVICE_NAME = "baton.v1.Node"

_INTERVAL_S_MIN = 0.02


class NodeService(node_pb2_grpc.NodeServicer):
    """The Node service of one node.

    Args:
        status: returns the node's current status.
        drain: begins a drain and returns at once; None means the configured grace.
        switch: changes the node's role; yields how far it is.
        cache: what the node's prefix cache has.
        load_adapter: loads an adapter of this name from a directory.
        unload_adapter: unloads the adapter of this name.
        expert_load: reads the tokens of each expert.
    """

    def __init__(
        self,
        *,
        status: Callable[[], pb.NodeStatus],
        drain: Callable[[float | None], None],
        switch: Callable[[pb.SwitchRoleRequest], AsyncIterator[pb.SwitchRoleResponse]],
        cache: CacheEvents,
        load_adapter: Callable[[str, Path], Awaitable[AdapterRef]],
        unload_adapter: Callable[[str], None],
        expert_load: Callable[[], Awaitable[pb.GetExpertLoadResponse]],
    ) -> None:
        self._expert_load = expert_load
        self._load_adapter = load_adapter
        self._unload_adapter = unload_adapter
        self._switch = switch
        self._status = status
        self._cache = cache
        self._drain = drain
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ends every stream."""
        self._cache.close()
        self._closed.set()

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.NodeStatus]
    ) -> pb.NodeStatus:
        return self._status()

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, pb.NodeStatus]
    ) -> AsyncIterator[pb.NodeStatus]:
        interval_s = max(_INTERVAL_S_MIN, request.interval_s) if request.HasField("interval_s") else 1.0
        last = None
        while not self._closed.is_set():
            status = self._status()
            if status != last:
                yield status
                last = status
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), interval_s)

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        self._drain(request.grace_s if request.HasField("grace_s") else None)
        return pb.DrainResponse()

    async def SwitchRole(
        self,
        request: pb.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchRoleRequest, pb.SwitchRoleResponse],
    ) -> AsyncIterator[pb.SwitchRoleResponse]:
        async for progress in self._switch(request):
            yield progress

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        loaded = await self._load_adapter(request.name, Path(request.path))
        return pb.LoadAdapterResponse(adapter=adapter_to_proto(loaded))

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        self._unload_adapter(request.name)
        return pb.UnloadAdapterResponse()

    async def GetExpertLoad(
        self,
        request: pb.GetExpertLoadRequest,
        context: grpc.aio.ServicerContext[pb.GetExpertLoadRequest, pb.GetExpertLoadResponse],
    ) -> pb.GetExpertLoadResponse:
        return await self._expert_load()

    async def WatchCache(
        self,
        request: pb.WatchCacheRequest,
        context: grpc.aio.ServicerContext[pb.WatchCacheRequest, pb.WatchCacheResponse],
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        async for batch in self._cache.watch(request):
            yield batch
