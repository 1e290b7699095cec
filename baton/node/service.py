"""The Node service: describe, watch, watch the cache, drain, switch the role, adapters, experts, pulls and drops of KV.

It starts before the node can serve, so that others see how far the node's start is. Other parts make its messages.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.core.errors import BatonError, Draining, PeerRefused
from baton.core.types import AdapterRef
from baton.node.cache_events import CacheEvents
from baton.node.pull_owner import PullOwner
from baton.node.status_feed import StatusFeed
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.internal.v1 import node_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert import adapter_to_proto
from baton.rpc.convert_node import describe_loading
from baton.rpc.status import abort, client_may_leave

SERVICE_NAME = "baton.internal.v1.Node"

_INTERVAL_S_MIN, _INTERVAL_S_MAX = 0.02, 3600.0
# NOTE: an unchanged status is sent again. Gateways add the requests that they send to a node's last status. If those
# requests end up elsewhere, the status does not change: an idle node would seem full for ever and get no requests.
_REPEAT_S = 1.0


@dataclass(frozen=True)
class NodeParts:
    """The parts of a serving node that the service uses.

    Args:
        status: returns the node's current status.
        drain: begins a drain and returns at once; None means the configured grace.
        switch: changes the node's role; yields its progress.
        cache: serves the content of the node's prefix cache.
        load_adapter: loads an adapter of this name from a directory.
        unload_adapter: unloads the adapter of this name.
        expert_load: reads the tokens of each expert.
        drop_kv: drops the KV of a cache salt.
        owner: sends KV to other nodes; None: the node keeps none outside of its cache.
    """

    status: Callable[[], node_status_pb2.NodeStatus]
    drain: Callable[[float | None], None]
    switch: Callable[[pb.SwitchRoleRequest], AsyncIterator[node_status_pb2.RoleSwitchProgress]]
    cache: CacheEvents
    load_adapter: Callable[[str, Path], Awaitable[AdapterRef]]
    unload_adapter: Callable[[str], None]
    expert_load: Callable[[], Awaitable[pb.GetExpertLoadResponse]]
    drop_kv: Callable[[pb.DropKvRequest], Awaitable[pb.DropKvResponse]]
    owner: PullOwner | None = None


class NodeService(node_pb2_grpc.NodeServicer):
    """The Node service of one node, which is loading until `serve` is called.

    Args:
        loading: returns the status of the node while it loads.
    """

    def __init__(self, loading: Callable[[], node_status_pb2.NodeStatus]) -> None:
        self._loading = loading
        self._parts: NodeParts | None = None
        self._feed = StatusFeed(self._status)

    def serve(self, parts: NodeParts) -> None:
        """Serves these parts from now on."""
        self._parts = parts

    def close(self) -> None:
        """Ends every stream."""
        if self._parts is not None:
            self._parts.cache.close()
        self._feed.close()

    @property
    def _served(self) -> NodeParts:
        """The parts that serve, once the node serves.

        Raises:
            Draining: the node does not serve yet.
        """
        if self._parts is None:
            status = self._loading()
            raise Draining(f"{status.info.name} is {describe_loading(status.loading)}", cure="try again when it serves")
        return self._parts

    def _status(self) -> node_status_pb2.NodeStatus:
        return self._loading() if self._parts is None else self._parts.status()

    async def Describe(
        self,
        request: pb.DescribeRequest,
        context: grpc.aio.ServicerContext[pb.DescribeRequest, node_status_pb2.NodeStatus],
    ) -> node_status_pb2.NodeStatus:
        return self._status()

    async def Watch(
        self, request: pb.WatchRequest, context: grpc.aio.ServicerContext[pb.WatchRequest, node_status_pb2.NodeStatus]
    ) -> AsyncIterator[node_status_pb2.NodeStatus]:
        interval_s = _bounded_s(request.interval_s) if request.HasField("interval_s") else 1.0
        feed = self._feed.watch(
            interval_s=interval_s,
            repeat_s=_bounded_s(request.repeat_s) if request.HasField("repeat_s") else _REPEAT_S,
            # NOTE: a gateway of an older release would take a loading node for one that serves another model.
            while_loading=request.while_loading,
            without_unchanged=request.without_unchanged,
        )
        async for status in feed:
            yield status

    async def Drain(
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        self._served.drain(request.grace_s if request.HasField("grace_s") else None)
        return pb.DrainResponse()

    async def SwitchRole(
        self,
        request: pb.SwitchRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchRoleRequest, node_status_pb2.RoleSwitchProgress],
    ) -> AsyncIterator[node_status_pb2.RoleSwitchProgress]:
        async for progress in self._served.switch(request):
            yield progress

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        loaded = await self._served.load_adapter(request.name, Path(request.path))
        return pb.LoadAdapterResponse(adapter=adapter_to_proto(loaded))

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        self._served.unload_adapter(request.name)
        return pb.UnloadAdapterResponse()

    async def GetExpertLoad(
        self,
        request: pb.GetExpertLoadRequest,
        context: grpc.aio.ServicerContext[pb.GetExpertLoadRequest, pb.GetExpertLoadResponse],
    ) -> pb.GetExpertLoadResponse:
        return await self._served.expert_load()

    async def Pull(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[pb.PullRequest],
        context: grpc.aio.ServicerContext[pb.PullRequest, pb.PullResponse],
    ) -> None:
        with client_may_leave():
            try:
                owner = self._served.owner
                if owner is None:
                    raise PeerRefused("this node keeps no KV outside of its cache", cure="give it --host-cache-gib")
                await owner.serve(request_iterator, context.write)
            except BatonError as error:
                await abort(context, error)

    async def DropKv(
        self, request: pb.DropKvRequest, context: grpc.aio.ServicerContext[pb.DropKvRequest, pb.DropKvResponse]
    ) -> pb.DropKvResponse:
        return await self._served.drop_kv(request)

    async def WatchCache(
        self,
        request: pb.WatchCacheRequest,
        context: grpc.aio.ServicerContext[pb.WatchCacheRequest, pb.WatchCacheResponse],
    ) -> AsyncIterator[pb.WatchCacheResponse]:
        async for batch in self._served.cache.watch(request):
            yield batch


def _bounded_s(wanted_s: float) -> float:
    """An interval that a caller wants, within bounds; NaN is the shortest."""
    return min(max(_INTERVAL_S_MIN, wanted_s), _INTERVAL_S_MAX)
