"""The service for operators, baton.v1.Operations."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from baton.core.errors import InvalidRequest
from baton.core.version import __version__
from baton.gateway.grpc.call import answering
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.request.kv_drop import drop_kv
from baton.gateway.request.role_change import switch_role
from baton.gateway.serving.serving import Serving
from baton.protos.v1 import operations_pb2 as pb
from baton.protos.v1 import operations_pb2_grpc
from baton.rpc.convert import adapters_from_proto
from baton.security import identity

SERVICE_NAME = "baton.v1.Operations"


class OperationsService(operations_pb2_grpc.OperationsServicer):
    """Reports the cluster's state as this gateway sees it, switches the roles of nodes and drops their KV."""

    def __init__(self, serving: Serving, connections: Connections, view: View) -> None:
        self._view = view
        self._serving = serving
        self._connections = connections
        self._fleet = connections.fleet

    async def GetLoads(
        self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext[pb.GetLoadsRequest, pb.GetLoadsResponse]
    ) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(nodes=self._fleet.loads(), requests_running=self._serving.running)

    async def ClusterStatus(
        self,
        request: pb.ClusterStatusRequest,
        context: grpc.aio.ServicerContext[pb.ClusterStatusRequest, pb.ClusterStatusResponse],
    ) -> pb.ClusterStatusResponse:
        counters = self._serving.counters
        return pb.ClusterStatusResponse(
            gateway=self._view.name,
            nodes=self._fleet.report(),
            requests_running=self._serving.running,
            requests_finished=counters.finished,
            requests_failed=counters.failed,
            remote_total=counters.remote,
            local_total=counters.local,
            warnings=self._serving.model.chat.warnings,
            package_version=__version__,
            workers=[
                pb.WorkerLoad(
                    busy_share=load.busy_share,
                    tokens_per_s=load.tokens_per_s,
                    limit_tokens_per_s=load.limit_tokens_per_s or 0,
                )
                for load in self._serving.worker_loads
            ],
        )

    async def ClusterView(
        self,
        request: pb.ClusterViewRequest,
        context: grpc.aio.ServicerContext[pb.ClusterViewRequest, pb.ClusterViewResponse],
    ) -> pb.ClusterViewResponse:
        async with answering(context):
            shown = await self._view.shown_to(identity.current())
            return pb.ClusterViewResponse(state_json=shown.decode())

    async def SwitchNodeRole(
        self,
        request: pb.SwitchNodeRoleRequest,
        context: grpc.aio.ServicerContext[pb.SwitchNodeRoleRequest, pb.SwitchNodeRoleResponse],
    ) -> AsyncIterator[pb.SwitchNodeRoleResponse]:
        async with answering(context):
            grace_s = request.grace_s if request.HasField("grace_s") else None
            switching = switch_role(self._connections, request.node, request.role, grace_s=grace_s, force=request.force)
            async with aclosing(switching):
                async for progress in switching:
                    yield pb.SwitchNodeRoleResponse(progress=progress)

    async def DropKv(
        self, request: pb.DropKvRequest, context: grpc.aio.ServicerContext[pb.DropKvRequest, pb.DropKvResponse]
    ) -> pb.DropKvResponse:
        async with answering(context):
            if identity.current().proved and not request.client:
                raise InvalidRequest(
                    "the request names no client, and this gateway keeps the KV of each client apart",
                    field="client",
                    value="",
                    allowed=("the name of an API key", "the subject of a token"),
                    cure="name the client; `baton drop-kv` has --client",
                )
            for adapter in request.adapters:
                if not (adapter.name and adapter.revision):
                    raise InvalidRequest(
                        "an adapter lacks its name or its revision, so nodes cannot know which KV is meant",
                        field="adapters",
                        value=adapter.name or adapter.revision,
                        allowed=("name and revision",),
                        cure="`baton adapter list --json` shows revisions",
                    )
            salt = identity.salt_of(request.client, request.cache_salt) if request.client else request.cache_salt
            nodes = await drop_kv(self._connections, salt, adapters_from_proto(request.adapters))
            return pb.DropKvResponse(nodes=nodes)
