"""This node's connection to one prefill node: a Pair stream, from its hello to its last message.

A peer lives as long as its stream. When the stream ends, the peer's endpoints are closed, which cancels what was in
flight.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from baton.core.errors import BatonError, NoNode, PeerRefused
from baton.node.assembly import Node
from baton.node.describe import (
    describe_conversion,
    describe_measure,
    describe_mismatches,
    from_addresses,
    from_measure,
    to_addresses,
    to_warm_ups,
)
from baton.node.peer_checks import check_addresses
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node.events import Event, HandOverReceived, QuietReceived
from kvtransfer.plan import NodeDescription, WirePlan, links_between
from kvtransfer.records import LinkMeasure, PeerTraffic

log = logging.getLogger("baton")

Incoming = AsyncIterator[pb.PairRequest]
Write = Callable[[pb.PairResponse], Awaitable[None]]
Deliver = Callable[[Event], None]

_HELLO_TIMEOUT_S = 10.0
_WARM_UP_TIMEOUT_S = 10.0
# A pair ends this long after its link has broken, so that messages already received are read first.
_BROKEN_END_S = 0.2


class PrefillPeer:
    """One prefill node, for the life of one Pair stream. Its hello has been accepted.

    Args:
        number: the sender number of its first rank; the other ranks' numbers follow.
        state: its entry in the status.
        incoming, write: its stream.
        deliver: receives, in order, its messages about leases.

    Attributes:
        ended: set when its stream has ended.
    """

    def __init__(
        self,
        node: Node,
        number: int,
        state: node_status_pb2.PeerState,
        incoming: Incoming,
        write: Write,
        *,
        deliver: Deliver,
    ) -> None:
        self.number = number
        self.state = state
        self.ended = asyncio.Event()
        self._node = node
        self._incoming = incoming
        self._write = write
        self._deliver = deliver
        self._has_draft = True
        self._outbox: asyncio.Queue[pb.PairResponse | None] = asyncio.Queue()  # None ends the stream

    @property
    def ready(self) -> bool:
        return self.state.phase == node_status_pb2.PEER_PHASE_READY

    def note_traffic(self, traffic: Mapping[int, PeerTraffic]) -> None:
        if sent := traffic.get(self.number):
            self.state.bytes_total, self.state.segments_total = sent.bytes_total, sent.segments_total

    # ---- the handshake: connect every link, measure

    async def connect(self, theirs: NodeDescription, plan: WirePlan) -> LinkMeasure:
        """Connects every link, and measures the warm links.

        Raises:
            TimeoutError: the peer did not send its next message in time.
            NoNode: the stream ends during the handshake.
            BatonError: the links could not be opened, connected or measured.
        """
        try:
            await self._connect_links(theirs, plan)
            return await self._measure()
        except TimeoutError:
            raise TimeoutError(f"no warm-up within {_WARM_UP_TIMEOUT_S:g} s") from None

    async def _connect_links(self, theirs: NodeDescription, plan: WirePlan) -> None:
        transfer = self._node.transfer
        flows = links_between(theirs, self._node.description)
        addresses = await transfer.listen(self.number, flows, sends=False, on_failed=self._link_failed)
        accepted = pb.PairAccepted(
            info=self._node.info,
            worker_addresses=from_addresses(addresses),
            sender_number=self.number,
            wire_version=plan.wire_version,
            message_bytes=transfer.message_bytes,
            kv_scales=self._node.kv_scales,
        )
        await self._write(pb.PairResponse(accepted=accepted))
        async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
            worker_addresses = (await _receive(self._incoming)).linked.worker_addresses
        check_addresses(worker_addresses, links=len(flows))
        await transfer.connect(
            self.number,
            to_addresses(worker_addresses),
            incarnation=self.state.incarnation,
            sealed=plan.sealed,
            has_draft=plan.has_draft,
        )
        self._has_draft = plan.has_draft
        await self._write(pb.PairResponse(connected=pb.PairConnected()))

    async def _measure(self) -> LinkMeasure:
        async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
            message = await _receive(self._incoming)
            measure = await self._node.transfer.warmed_up(
                self.number, to_warm_ups(message.warmed_up), timeout_s=_WARM_UP_TIMEOUT_S
            )
        self.state.transport = measure.transport
        self.state.gigabytes_per_s = measure.gigabytes_per_s
        self.state.latency_s = measure.latency_s
        return measure

    async def make_ready(self, measure: LinkMeasure) -> None:
        """Ends the handshake: the peer is ready, and may send KV."""
        self.state.phase = node_status_pb2.PEER_PHASE_READY
        links = describe_measure(measure) + describe_conversion(self.state.kv_converted)
        log.info("paired with %s over %s", self.state.name, links)
        if self._node.description.spec.draft is not None and not self._has_draft:
            log.warning(
                "%s sends no KV of the layer that drafts tokens, so it drafts nothing for requests from there, and "
                "nothing of them is cached here; --speculation text on this node avoids that",
                self.state.name,
            )
        await self._write(pb.PairResponse(ready=from_measure(measure)))

    # ---- after the handshake

    async def exchange(self) -> None:
        """Reads and writes until the peer closes the stream, it breaks, or `end` is called."""
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(), name=f"peer-{self.number}")
            while (response := await self._outbox.get()) is not None:
                await self._write(response)
            reader.cancel()

    def send_lease_ended(self, lease: int) -> None:
        self._outbox.put_nowait(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))

    def end(self) -> None:
        """Ends the stream once everything queued has been written."""
        self._outbox.put_nowait(None)

    async def disconnect(self) -> tuple[int, ...]:
        """Closes the links after the stream's end. Returns the leases that the peer was filling."""
        state = self.state
        if self.ready:
            log.info("lost %s: %s", state.name, state.detail or "its stream broke")
        if state.phase != node_status_pb2.PEER_PHASE_REFUSED:
            state.phase = node_status_pb2.PEER_PHASE_LOST
            state.detail = state.detail or "its stream broke"
        self.note_traffic(self._node.transfer.counters().peers)  # `disconnect` drops the peer's counters
        return await self._node.transfer.disconnect(self.number)

    async def _read(self) -> None:
        try:
            async for message in self._incoming:
                match message.WhichOneof("message"):
                    case "hand_over":
                        incarnation, has_draft = self.state.incarnation, self._has_draft
                        self._deliver(HandOverReceived(self.number, message.hand_over, incarnation, has_draft))
                    case "quiet":
                        self._deliver(QuietReceived(self.number, message.quiet, self.state.incarnation))
                    case "refused":
                        mismatches = list(message.refused.mismatches)
                        self.state.phase = node_status_pb2.PEER_PHASE_REFUSED
                        self.state.mismatches.extend(mismatches)
                        log.warning("%s refused this node: %s", self.state.name, describe_mismatches(mismatches))
                        return
        finally:
            self.end()

    def _link_failed(self, error: BatonError) -> None:
        """Ends the stream, so that the prefill node makes the pair again."""
        self.state.detail = self.state.detail or str(error)
        asyncio.get_running_loop().call_later(_BROKEN_END_S, self.end)


async def receive_hello(incoming: Incoming) -> pb.PairHello:
    """A stream's first message.

    Raises:
        PeerRefused: it is not a hello.
        NoNode: the stream ends before it.
    """
    async with asyncio.timeout(_HELLO_TIMEOUT_S):
        message = await _receive(incoming)
    if message.WhichOneof("message") != "hello":
        raise PeerRefused("the first message of a pair is not a hello", cure="use the same version on both nodes")
    return message.hello


async def _receive(incoming: Incoming) -> pb.PairRequest:
    """The peer's next message. Raises NoNode if the peer has ended the stream."""
    message = await anext(aiter(incoming), None)
    if message is None:
        raise NoNode("the prefill node ended the stream during the handshake", cure="see its log")
    return message
