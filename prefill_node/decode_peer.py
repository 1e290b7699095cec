"""This node's connection to one decode node: a Pair stream, from the handshake to its last message.

A peer lives as long as its stream. When the stream ends, its endpoints are closed, what is in flight to it is
cancelled, and its calls fail.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from statistics import median
from typing import Any, TypeVar

import grpc

from baton.core.errors import BatonError, InternalError, NoNode
from baton.core.tracebacks import drop_tracebacks
from baton.node.assembly import Node
from baton.node.describe import (
    describe_conversion,
    describe_measure,
    describe_mismatches,
    from_addresses,
    from_info,
    from_warm_ups,
    to_addresses,
    to_measure,
    to_mismatches,
)
from baton.node.link_floor import below_floor
from baton.node.peer_checks import check_accepted, check_addresses, check_info, check_measure
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import decode_pb2_grpc
from baton.protos.v1 import node_status_pb2
from baton.rpc.channels import connect
from baton.rpc.status import from_rpc_error
from baton.security.tls import Dial
from kvtransfer.conversion import KVConversion, conversion_of
from kvtransfer.link import LinkSpeed
from kvtransfer.plan import PlanRefused, agree, links_between
from kvtransfer.ranked import RankedTransfer
from prefill_node.events import LeaseEnded, PeerFacts, PeerLost

log = logging.getLogger("baton")

_TURNS = 7
_TURN_EVERY_S = 0.01

Call = grpc.aio.StreamStreamCall[pb.PairRequest, pb.PairResponse]
T = TypeVar("T")
Deliver = Callable[[LeaseEnded | PeerLost], None]


class DecodePeer:
    """One decode node, for the life of one Pair stream. Connects at once.

    Args:
        number: this node's number for the peer's first rank; the other ranks' numbers follow.
        timeout_s: for the handshake.
        deliver: called with `LeaseEnded`, and once with `PeerLost`.
        dial: credentials of the channel to it.

    Attributes:
        state: the peer's state in this node's status.
        link: as measured in the handshake; None until then.
        turn_s: median time from the event loop to the peer's sending threads and back.
    """

    def __init__(
        self, node: Node, address: str, number: int, *, timeout_s: float, deliver: Deliver, dial: Dial | None = None
    ) -> None:
        self.number = number
        self._dial = dial
        self.state = node_status_pb2.PeerState(
            name=address, address=address, phase=node_status_pb2.PEER_PHASE_CONNECTING
        )
        self.link: LinkSpeed | None = None
        self.turn_s = 0.0
        self._node = node
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._sender_number = 0
        self._max_context_tokens: int | None = None
        self._conversion: KVConversion | None = None
        self._sealed = False
        self._has_draft = True
        self._outbox: asyncio.Queue[pb.PairRequest] = asyncio.Queue()
        self._settled = asyncio.Event()
        self._ending = False
        self._task = asyncio.create_task(self._live(), name=f"peer-{address}")

    @property
    def ready(self) -> bool:
        return self.state.phase == node_status_pb2.PEER_PHASE_READY

    @property
    def over(self) -> bool:
        return self.state.phase in (node_status_pb2.PEER_PHASE_LOST, node_status_pb2.PEER_PHASE_REFUSED)

    @property
    def facts(self) -> PeerFacts:
        """The facts about a ready peer that a call needs."""
        return PeerFacts(
            number=self.number,
            sender_number=self._sender_number,
            transport=self.state.transport,
            kv_converted=self.state.kv_converted,
            max_context_tokens=self._max_context_tokens,
            has_draft=self._has_draft,
        )

    async def settled(self) -> node_status_pb2.PeerState:
        """Waits until the handshake is over; returns the peer's state."""
        await self._settled.wait()
        return self.state

    def send(self, message: pb.PairRequest) -> None:
        """Queues a message. Nothing is sent after the stream has ended."""
        self._outbox.put_nowait(message)

    async def close(self) -> None:
        if not self._ending:  # else the task is closing the links, and must not be cancelled
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._ending:  # a task that is cancelled before it has begun does nothing
            await self._end()

    async def _live(self) -> None:
        try:
            async with connect(
                self.state.address, keepalive_s=self._node.settings.keepalive_s, dial=self._dial
            ) as channel:
                call = decode_pb2_grpc.DecodeStub(channel).Pair()
                async with asyncio.timeout(self._timeout_s):
                    ready = await self._handshake(call)
                if ready:
                    await self._exchange(call)
        except* Exception as failed:  # noqa: BLE001  any failure of one peer costs that peer alone
            self.state.detail = self.state.detail or self._describe(failed.exceptions[0])
            drop_tracebacks(failed)  # their frames hold the connection
        finally:
            await self._end()

    # ---- the handshake: agree on a plan, connect every link, measure

    async def _handshake(self, call: Call) -> bool:
        """Returns whether the peer is ready. If one of the two nodes refuses, the state has the reasons."""
        accepted = await self._introduce(call)
        if accepted is None:
            return False
        await self._connect_links(call, accepted)
        if not await self._measure(call):
            return False
        self.state.phase = node_status_pb2.PEER_PHASE_READY
        self._settled.set()
        return True

    async def _introduce(self, call: Call) -> pb.PairAccepted | None:
        await _write(call, pb.PairRequest(hello=pb.PairHello(info=self._node.info)))
        response = await _read(call, self.state.address)
        refused = response.WhichOneof("message") == "refused"
        info = response.refused.info if refused else response.accepted.info
        check_info(info, role=node_status_pb2.ROLE_DECODE)
        self.state.name, self.state.incarnation = info.name, info.incarnation
        self._max_context_tokens = info.max_context_tokens
        try:
            plan = agree(self._node.description, from_info(info))
        except PlanRefused as error:
            self._refuse(to_mismatches(error.mismatches))
            return None
        if refused:
            self._refuse(list(response.refused.mismatches))
            return None
        self.state.kv_converted = plan.conversion
        self._sealed = plan.sealed
        self._has_draft = plan.has_draft
        self._conversion = conversion_of(plan, response.accepted.kv_scales)
        return response.accepted

    async def _connect_links(self, call: Call, accepted: pb.PairAccepted) -> None:
        """Connects every link. The decode node connects first, because it must be able to receive before this node
        sends."""
        self._sender_number = accepted.sender_number
        transfer = self._node.transfer
        check_accepted(accepted, ranks=self._node.description.tensor_parallel_size)
        flows = links_between(self._node.description, from_info(accepted.info))
        check_addresses(accepted.worker_addresses, links=len(flows))
        addresses = from_addresses(await transfer.listen(self.number, flows, sends=True, on_failed=self._link_failed))
        await _write(call, pb.PairRequest(linked=pb.PairLinked(worker_addresses=addresses)))
        await _read(call, self.state.name)
        connecting = transfer.connect(
            self.number,
            to_addresses(accepted.worker_addresses),
            message_bytes=accepted.message_bytes,
            conversion=self._conversion,
            sealed=self._sealed,
        )
        await _unless_ended(call, self.state.name, connecting)

    async def _measure(self, call: Call) -> bool:
        """Sends the warm-up messages that the decode node times. Returns False if a node refuses so slow a link."""
        transfer = self._node.transfer
        warm = await _unless_ended(call, self.state.name, transfer.warm_up(self.number, self._sender_number))
        await _write(call, pb.PairRequest(warmed_up=from_warm_ups(warm)))
        response = await _read(call, self.state.name)
        if response.WhichOneof("message") == "refused":
            self._refuse(list(response.refused.mismatches))
            return False
        measure = check_measure(to_measure(response.ready))
        self.state.transport = measure.transport
        self.state.gigabytes_per_s = measure.gigabytes_per_s
        self.state.latency_s = measure.latency_s
        if mismatch := below_floor(self._node, measure):
            self._refuse(to_mismatches((mismatch,)))
            await self._send_refusal(call)
            return False
        await transfer.use_link(self.number, measure.speed)
        self.turn_s = await _turn_s(transfer, self.number)
        self.link = measure.speed
        described = describe_measure(measure) + describe_conversion(self.state.kv_converted)
        log.info("connected to %s over %s", self.state.name, described)
        return True

    def _refuse(self, mismatches: list[node_status_pb2.Mismatch]) -> None:
        self.state.phase = node_status_pb2.PEER_PHASE_REFUSED
        self.state.mismatches.extend(mismatches)
        log.warning("cannot work with %s: %s", self.state.name, describe_mismatches(mismatches))

    async def _send_refusal(self, call: Call) -> None:
        """Refuses the decode node. Waits until it has received this: closing the channel would overtake the message."""
        refused = pb.PairRefused(info=self._node.info, mismatches=self.state.mismatches)
        await _write(call, pb.PairRequest(refused=refused))
        await call.read()

    # ---- after the handshake

    async def _exchange(self, call: Call) -> None:
        """Reads and writes until the peer ends the stream."""
        async with asyncio.TaskGroup() as tasks:
            writing = tasks.create_task(self._write_all(call))
            # NOTE: not `async for`: a grpc call refuses to mix that with read().
            while isinstance(response := await call.read(), pb.PairResponse):
                if response.WhichOneof("message") == "lease_ended":
                    self._deliver(LeaseEnded(self.number, response.lease_ended.lease))
            writing.cancel()

    async def _write_all(self, call: Call) -> None:
        # `read` reports why a stream has ended.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outbox.get())

    def _link_failed(self, error: BatonError) -> None:
        """Ends the pair at once, so that the next call makes it again."""
        if not self._ending:
            self._ending = True
            self.state.detail = str(error)
            self._task.cancel()

    def _describe(self, error: Exception) -> str:
        match error:
            case grpc.aio.AioRpcError():
                return str(from_rpc_error(error))
            case TimeoutError():
                return f"no connection within {self._timeout_s:g} s"
            case BatonError():
                return str(error)
            case asyncio.InvalidStateError():  # raised by a write
                return "it ended the stream during the handshake"
            case _:
                log.error("the pair with %s failed", self.state.name, exc_info=error)
                return str(InternalError(f"{type(error).__name__}: {error}"))

    async def _end(self) -> None:
        self._ending = True
        if self.state.phase != node_status_pb2.PEER_PHASE_REFUSED:
            self.state.phase = node_status_pb2.PEER_PHASE_LOST
            self.state.detail = self.state.detail or "the stream ended"
            log.info("lost %s: %s", self.state.name, self.state.detail)
        self._settled.set()
        self._deliver(PeerLost(self.number, NoNode(f"{self.state.name} is gone: {self.state.detail}")))
        await self._node.transfer.disconnect(self.number)


async def _write(call: Call, message: pb.PairRequest) -> None:
    with suppress(asyncio.InvalidStateError):  # the stream has ended, and `_read` says why
        await call.write(message)


async def _unless_ended(call: Call, name: str, work: Coroutine[Any, Any, T]) -> T:
    """Waits for work on the links, but not after the decode node has given the pair up, which ends the stream.

    Raises:
        AioRpcError: the decode node gave up for this reason.
        NoNode: the stream has ended without one.
    """
    working, ending = asyncio.create_task(work), asyncio.create_task(call.code())
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            await _read(call, name)
            raise NoNode(f"{name} ended the stream during the handshake", cure="see its log")
        return working.result()
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.wait([working, ending])


async def _turn_s(transfer: RankedTransfer, peer: int) -> float:
    """Measures the time to the sending threads and back, with calls that those answer at once.

    The pauses let the threads fall asleep, as they do between chunks.
    """
    took_s = []
    for _ in range(_TURNS):
        await asyncio.sleep(_TURN_EVERY_S)
        begun_s = time.monotonic()
        await transfer.quiet(peer, lease=-1)
        took_s.append(time.monotonic() - begun_s)
    return median(took_s)


async def _read(call: Call, name: str) -> pb.PairResponse:
    response = await call.read()
    if not isinstance(response, pb.PairResponse):  # the end of the stream
        raise NoNode(f"{name} ended the stream during the handshake", cure="see its log")
    return response
