"""The Prefill service, which is the prefill role of a node process (`baton.node.role`). It may also serve Decode."""

from collections.abc import Mapping

import grpc

from baton.core.errors import BatonError
from baton.node.assembly import Node
from baton.node.waiting import until
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.protos.internal.v1 import prefill_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.server import ListenAddress
from baton.rpc.status import abort, client_may_leave
from baton.settings.node_config import PrefillSettings
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from kvtransfer.records import PeerTraffic
from prefill_node.driver import PrefillDriver
from prefill_node.events import Closing, DrainStarted
from prefill_node.pooling import PoolDriver

SERVICE_NAME = "baton.internal.v1.Prefill"

_CLOSE_TIMEOUT_S = 5.0


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """The services of one prefill node."""

    def __init__(self, node: Node, settings: PrefillSettings) -> None:
        self._decode = DecodeService(DecodeDriver(node, None)) if settings.also_decodes else None
        self._driver = PrefillDriver(node, settings, on_freed=self._freed)
        self._pooling = PoolDriver(node)

    async def Prefill(  # type: ignore[override]  # the stubs know generators only
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillEvent]
    ) -> None:
        with client_may_leave():
            try:
                await self._driver.prefill(request, context.write)
            except BatonError as error:
                await abort(context, error)

    async def Connect(
        self,
        request: pb.ConnectRequest,
        context: grpc.aio.ServicerContext[pb.ConnectRequest, node_status_pb2.PeerState],
    ) -> node_status_pb2.PeerState:
        try:
            # gRPC would also connect to names of other forms, such as unix:PATH.
            ListenAddress.parse(request.decode_address, field="decode_address")
        except BatonError as error:
            await abort(context, error)
        return await self._driver.peers.connect(request.decode_address)

    async def Pool(
        self, request: pb.PoolRequest, context: grpc.aio.ServicerContext[pb.PoolRequest, pb.PoolResponse]
    ) -> pb.PoolResponse:
        try:
            return await self._pooling.pool(request)
        except BatonError as error:
            await abort(context, error)

    def _freed(self) -> None:
        if self._decode is not None:
            self._decode.room_freed()

    # ---- the role

    @property
    def servicers(self) -> Mapping[str, object]:
        return {SERVICE_NAME: self} if self._decode is None else {SERVICE_NAME: self, **self._decode.servicers}

    def fill_status(self, status: node_status_pb2.NodeStatus, traffic: Mapping[int, PeerTraffic]) -> None:
        status.peers.extend(self._driver.peers.states(traffic))
        if self._decode is not None:
            self._decode.fill_status(status, traffic)

    def knows(self, request_id: str) -> bool:
        knows = self._driver.knows(request_id) or self._pooling.knows(request_id)
        return knows or (self._decode is not None and self._decode.knows(request_id))

    def leases(self) -> dict[str, int]:
        return {}

    @property
    def busy(self) -> bool:
        own = self._driver.busy or self._pooling.busy
        return own or (self._decode is not None and self._decode.busy)

    def stop_admission(self) -> None:
        self._driver.deliver(DrainStarted())
        self._pooling.stop_admission()
        if self._decode is not None:
            self._decode.stop_admission()

    async def close(self) -> None:
        """Ends running calls, each with a typed error, and closes every connection to a decode node."""
        self._driver.deliver(Closing())
        self._pooling.close()
        if self._decode is not None:
            await self._decode.close()
        await until(lambda: not (self._driver.busy or self._pooling.busy), timeout_s=_CLOSE_TIMEOUT_S)
        await self._driver.peers.close()
