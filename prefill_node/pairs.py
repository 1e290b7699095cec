"""The prefill node's side of its pairs: one line to each decode node, from hello to the last message.

Gateways ask for pairs before traffic, and a ticket makes a missing one. A pair lives as long as its stream: when that
breaks, its endpoint is closed, whatever was in flight to it is cancelled, and its requests fail.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from statistics import median

import grpc

from baton.errors import BatonError, NoNode, PeerRefused, UnknownLease
from baton.rpc.server import connect
from baton.rpc.status import from_rpc_error
from kvtransfer.conversion import KVConversion, conversion_of
from kvtransfer.link import LinkSpeed
from kvtransfer.plan import PlanRefused, agree, links_between
from kvtransfer.ranked import MOST_RANKS, RankedTransfer
from node.assembly import Node
from node.describe import (
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
from node.link_floor import below_floor
from protos.baton.v1 import common_pb2, decode_pb2_grpc
from protos.baton.v1 import decode_pb2 as pb

log = logging.getLogger("baton")

_TURNS = 7
_TURN_EVERY_S = 0.01
_LOST_KEPT = 32

Call = grpc.aio.StreamStreamCall[pb.PairRequest, pb.PairResponse]


class Pair:
    """One decode node as seen from here, for one stream's life.

    Args:
        number: this node's own for the peer: the first of those for the peer's ranks.
        on_lease_ended: hears of leases that the decode node took back. Other decode nodes count theirs alike.
        on_lost: hears, once, that the pair is gone.

    Attributes:
        link: what was measured when the pair was made; None until then.
        turn_s: likewise, from the event loop to the threads that send over the pair's links, and back.
        max_context_tokens: of the decode node; None until it has introduced itself.
    """

    def __init__(
        self,
        node: Node,
        address: str,
        number: int,
        *,
        timeout_s: float,
        on_lease_ended: Callable[["Pair", int], None],
        on_lost: Callable[["Pair"], None],
    ) -> None:
        self.number = number
        self.sender_number = 0
        self.state = common_pb2.PeerState(name=address, address=address, phase=common_pb2.PEER_PHASE_CONNECTING)
        self.link: LinkSpeed | None = None
        self.turn_s = 0.0
        self.max_context_tokens: int | None = None
        self._node = node
        self._timeout_s = timeout_s
        self._conversion: KVConversion | None = None
        self._on_lease_ended = on_lease_ended
        self._on_lost = on_lost
        self._outbox: asyncio.Queue[pb.PairRequest] = asyncio.Queue()
        self._settled = asyncio.Event()
        self._task = asyncio.create_task(self._live(), name=f"pair-{address}")

    @property
    def ready(self) -> bool:
        return self.state.phase == common_pb2.PEER_PHASE_READY

    @property
    def over(self) -> bool:
        return self.state.phase in (common_pb2.PEER_PHASE_LOST, common_pb2.PEER_PHASE_REFUSED)

    async def settled(self) -> common_pb2.PeerState:
        """The pair's state, once it is neither new nor under way."""
        await self._settled.wait()
        return self.state

    def write(self, request: pb.PairRequest) -> None:
        """Queues a message to the decode node; nothing is sent once the pair is lost."""
        self._outbox.put_nowait(request)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _live(self) -> None:
        writer: asyncio.Task[None] | None = None
        try:
            async with connect(self.state.address, keepalive_s=self._node.settings.keepalive_s) as channel:
                call = decode_pb2_grpc.DecodeStub(channel).Pair()
                async with asyncio.timeout(self._timeout_s):
                    accepted = await self._hello(call)
                    if accepted is None or not await self._warm_up(call, accepted):
                        return
                writer = asyncio.create_task(self._write_all(call))
                await self._read_all(call)
        except grpc.aio.AioRpcError as error:
            self.state.detail = str(from_rpc_error(error))
        except TimeoutError:
            self.state.detail = f"no pair within {self._timeout_s:g} s"
        except BatonError as error:
            self.state.detail = str(error)
        finally:
            if writer is not None:
                writer.cancel()
            await self._end()

    async def _hello(self, call: Call) -> pb.PairAccepted | None:
        """Introduces this node; None when one of the two refuses, with the reasons in the state."""
        await call.write(pb.PairRequest(hello=pb.PairHello(info=self._node.info)))
        response = await _read(call, self.state.address)
        info = response.refused.info if response.WhichOneof("message") == "refused" else response.accepted.info
        self.state.name, self.state.incarnation = info.name, info.incarnation
        self.max_context_tokens = info.max_context_tokens
        try:
            plan = agree(self._node.description, from_info(info))
        except PlanRefused as refused:
            self._refuse(to_mismatches(refused.mismatches))
            return None
        if response.WhichOneof("message") == "refused":
            self._refuse(list(response.refused.mismatches))
            return None
        self.state.kv_converted = plan.conversion
        self._conversion = conversion_of(plan, response.accepted.kv_scales)
        return response.accepted

    async def _connect(self, call: Call, accepted: pb.PairAccepted) -> None:
        """Connects every link; the decode node before this one, which will be the first to send."""
        self.sender_number = accepted.sender_number
        transfer = self._node.transfer
        flows = links_between(self._node.description, from_info(accepted.info))
        addresses = from_addresses(await transfer.listen(self.number, flows, sends=True))
        await call.write(pb.PairRequest(linked=pb.PairLinked(worker_addresses=addresses)))
        await _read(call, self.state.name)
        await transfer.connect(
            self.number,
            to_addresses(accepted.worker_addresses),
            message_bytes=accepted.message_bytes,
            conversion=self._conversion,
        )

    async def _warm_up(self, call: Call, accepted: pb.PairAccepted) -> bool:
        """Sends what the decode node times; False when the link is too slow for one of the two."""
        await self._connect(call, accepted)
        warm = await self._node.transfer.warm_up(self.number, self.sender_number)
        await call.write(pb.PairRequest(warmed_up=from_warm_ups(warm)))
        response = await _read(call, self.state.name)
        if response.WhichOneof("message") == "refused":
            self._refuse(list(response.refused.mismatches))
            return False
        measure = to_measure(response.ready)
        self.state.transport = measure.transport
        self.state.gigabytes_per_s = measure.gigabytes_per_s
        self.state.latency_s = measure.latency_s
        if mismatch := below_floor(self._node, measure):
            self._refuse(to_mismatches((mismatch,)))
            await self._tell_refused(call)
            return False
        await self._node.transfer.use_link(self.number, measure.speed)
        self.turn_s = await _turn_s(self._node.transfer, self.number)
        self.link = measure.speed
        self.state.phase = common_pb2.PEER_PHASE_READY
        self._settled.set()
        said = describe_measure(measure) + describe_conversion(self.state.kv_converted)
        log.info("paired with %s over %s", self.state.name, said)
        return True

    async def _tell_refused(self, call: Call) -> None:
        """Returns once the decode node has heard it: closing the channel would overtake the message."""
        refused = pb.PairRefused(info=self._node.info, mismatches=self.state.mismatches)
        await call.write(pb.PairRequest(refused=refused))
        await call.read()

    async def _write_all(self, call: Call) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _read_all(self, call: Call) -> None:
        # NOTE: not `async for`: a grpc call refuses to mix that with read().
        while isinstance(response := await call.read(), pb.PairResponse):
            if response.WhichOneof("message") == "lease_ended":
                self._on_lease_ended(self, response.lease_ended.lease)

    def _refuse(self, mismatches: list[common_pb2.Mismatch]) -> None:
        self.state.phase = common_pb2.PEER_PHASE_REFUSED
        self.state.mismatches.extend(mismatches)
        log.warning("cannot work with %s: %s", self.state.name, describe_mismatches(mismatches))

    async def _end(self) -> None:
        if self.state.phase != common_pb2.PEER_PHASE_REFUSED:
            self.state.phase = common_pb2.PEER_PHASE_LOST
            self.state.detail = self.state.detail or "its line broke"
            log.info("lost %s: %s", self.state.name, self.state.detail)
        self._settled.set()
        self._on_lost(self)
        await self._node.transfer.disconnect(self.number)


async def _turn_s(transfer: RankedTransfer, pair: int) -> float:
    """Typical of threads that had time to fall asleep. A lease that nothing is sent for is quiet at once."""
    took_s = []
    for _ in range(_TURNS):
        await asyncio.sleep(_TURN_EVERY_S)
        begun_s = time.monotonic()
        await transfer.quiet(pair, lease=-1)
        took_s.append(time.monotonic() - begun_s)
    return median(took_s)


async def _read(call: Call, name: str) -> pb.PairResponse:
    response = await call.read()
    if not isinstance(response, pb.PairResponse):  # the end of the stream
        raise NoNode(f"{name} ended the line before the pair was made", cure="see its log")
    return response


class Pairs:
    """All pairs of this node, by the decode node's address."""

    def __init__(
        self,
        node: Node,
        *,
        timeout_s: float,
        on_lease_ended: Callable[[Pair, int], None],
        on_lost: Callable[[Pair], None],
    ) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._on_lease_ended = on_lease_ended
        self._on_lost = on_lost
        self._numbers = itertools.count(MOST_RANKS, MOST_RANKS)
        self._by_address: dict[str, Pair] = {}

    async def connect(self, address: str) -> common_pb2.PeerState:
        """Makes the pair with a decode node unless it is there, and says how it stands."""
        return await self._pair(address).settled()

    async def for_ticket(self, ticket: common_pb2.Ticket) -> Pair:
        """The pair over which a ticket is to be served.

        Raises:
            PeerRefused, NoNode: there is no such pair, and none can be made.
            UnknownLease: the decode node that gave the ticket has been restarted since.
        """
        pair = self._pair(ticket.decode_address)
        state = await pair.settled()
        if state.phase == common_pb2.PEER_PHASE_REFUSED:
            raise PeerRefused(
                f"{state.name} and this node cannot work together: {describe_mismatches(list(state.mismatches))}"
            )
        if not pair.ready:
            raise NoNode(f"{ticket.decode_node} cannot be reached: {state.detail}")
        if state.incarnation != ticket.lease.incarnation:
            raise UnknownLease(
                f"the ticket is of incarnation {ticket.lease.incarnation:x} of {state.name}, "
                f"which is {state.incarnation:x} now",
                cure="ask for a new ticket",
            )
        return pair

    def states(self) -> list[common_pb2.PeerState]:
        """One line for each pair, with what was sent over it so far."""
        traffic = self._node.transfer.counters().peers
        for pair in self._by_address.values():
            if sent := traffic.get(pair.number):
                pair.state.bytes_total, pair.state.segments_total = sent.bytes_total, sent.segments_total
        return [pair.state for pair in self._by_address.values()]

    def _pair(self, address: str) -> Pair:
        pair = self._by_address.get(address)
        if pair is None or pair.over:
            pair = Pair(
                self._node,
                address,
                next(self._numbers),
                timeout_s=self._timeout_s,
                on_lease_ended=self._on_lease_ended,
                on_lost=self._on_lost,
            )
            self._keep(pair)
        return pair

    def _keep(self, pair: Pair) -> None:
        """In place of the one that was there; of those that are lost only the latest stay, for the status."""
        self._by_address.pop(pair.state.address, None)
        self._by_address[pair.state.address] = pair
        lost = [key for key, old in self._by_address.items() if old.state.phase == common_pb2.PEER_PHASE_LOST]
        for key in lost[:-_LOST_KEPT]:
            del self._by_address[key]

    async def close(self) -> None:
        for pair in list(self._by_address.values()):
            await pair.close()
