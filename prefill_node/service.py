"""The Prefill service: hands each call to whom it concerns."""

import grpc

from baton.errors import BatonError
from baton.rpc.status import abort
from prefill_node.node import PrefillNode
from protos.baton.v1 import common_pb2, node_pb2, prefill_pb2_grpc
from protos.baton.v1 import prefill_pb2 as pb

SERVICE_NAME = "baton.v1.Prefill"


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """The prefill role of a node process."""

    service_name = SERVICE_NAME

    def __init__(self, node: PrefillNode) -> None:
        self._node = node

    async def Prefill(  # type: ignore[override]  # the stubs know generators only
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]
    ) -> None:
        try:
            await self._node.prefill(request, context.write)
        except BatonError as error:
            await abort(context, error)

    async def Connect(
        self, request: pb.ConnectRequest, context: grpc.aio.ServicerContext[pb.ConnectRequest, common_pb2.PeerState]
    ) -> common_pb2.PeerState:
        return await self._node.connect(request.decode_address)

    # ---- the role (node.process.Role)

    def add_to(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    def fill_status(self, status: node_pb2.NodeStatus) -> None:
        self._node.fill_status(status)

    @property
    def busy(self) -> bool:
        return self._node.busy

    def stop_admission(self) -> None:
        self._node.stop_admission()

    async def close(self) -> None:
        await self._node.close()
