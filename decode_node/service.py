"""The Decode service, which is the decode role of a node process. It passes each stream to the part that serves it."""

from collections.abc import AsyncIterator, Mapping

import grpc

from baton.core.errors import BatonError
from baton.core.pools import left_after
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.status import abort, client_may_leave
from decode_node.driver import DecodeDriver
from kvtransfer.records import PeerTraffic

SERVICE_NAME = "baton.internal.v1.Decode"


class DecodeService(decode_pb2_grpc.DecodeServicer):
    """The decode role of a node process (`baton.node.role`)."""

    def __init__(self, driver: DecodeDriver) -> None:
        self._driver = driver

    async def Session(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        with client_may_leave():
            await self._driver.sessions.serve(context.peer(), request_iterator, context.write)

    async def Pair(  # type: ignore[override]  # the stubs know generators only
        self,
        request_iterator: AsyncIterator[pb.PairRequest],
        context: grpc.aio.ServicerContext[pb.PairRequest, pb.PairResponse],
    ) -> None:
        with client_may_leave():
            if not self._driver.machine.rules.gives_leases:
                async for _ in request_iterator:  # its hello
                    await context.write(pb.PairResponse(refused=self._driver.pair_refused()))
                    break
                return
            try:
                await self._driver.peers.serve(request_iterator, context.write)
            except BatonError as error:
                await abort(context, error)

    # ---- the role

    def room_freed(self) -> None:
        """Notes that another request of the same engine has freed its blocks."""
        self._driver.room_freed()

    @property
    def servicers(self) -> Mapping[str, object]:
        return {SERVICE_NAME: self}

    def fill_status(self, status: node_status_pb2.NodeStatus, traffic: Mapping[int, PeerTraffic]) -> None:
        machine = self._driver.machine
        status.requests_waiting += machine.waiting
        status.blocks_open[:] = left_after(status.blocks_open, machine.waiting_blocks())
        status.segments_refused += machine.messages_refused
        status.peers.extend(self._driver.peers.states(traffic))

    def knows(self, request_id: str) -> bool:
        return self._driver.machine.task_of(request_id) is not None

    def leases(self) -> dict[str, int]:
        return self._driver.machine.leases if self._driver.machine.rules.gives_leases else {}

    @property
    def busy(self) -> bool:
        return self._driver.machine.busy

    def stop_admission(self) -> None:
        self._driver.stop_admission()

    async def close(self) -> None:
        await self._driver.close()
