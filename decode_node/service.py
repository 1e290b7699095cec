"""The Decode service: hands each stream to whom it concerns."""

from collections.abc import AsyncIterator

import grpc

from baton.errors import BatonError
from baton.rpc.status import abort
from decode_node.node import DecodeNode
from decode_node.session import serve_session
from protos.baton.v1 import decode_pb2 as pb
from protos.baton.v1 import decode_pb2_grpc, node_pb2

SERVICE_NAME = "baton.v1.Decode"


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The decode role of a node process."""

    service_name = SERVICE_NAME

    def __init__(self, node: DecodeNode) -> None:
        self._node = node

    async def Session(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        session = self._node.open_session(context.peer())
        await serve_session(session, request_iterator, context.write, self._node)

    async def Pair(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[pb.PairRequest],
        context: grpc.aio.ServicerContext[pb.PairRequest, pb.PairResponse],
    ) -> None:
        try:
            await self._node.pairs.serve(request_iterator, context.write)
        except BatonError as error:
            await abort(context, error)

    # ---- the role (node.process.Role)

    def add_to(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    def fill_status(self, status: node_pb2.NodeStatus) -> None:
        self._node.fill_status(status)

    @property
    def busy(self) -> bool:
        return self._node.busy

    def stop_admission(self) -> None:
        self._node.stop_admission()

    async def close(self) -> None:
        await self._node.close()
