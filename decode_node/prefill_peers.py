"""The prefill nodes that may send KV here: their Pair streams, their links, and the measured speed of the links.

A peer lives as long as its stream. When the stream ends, the peer's endpoints are closed, which cancels what was in
flight, and only the peer's entry in the status is kept.

Each incarnation has one ready pair, and an older pair wins over a newer one: anybody may claim an incarnation, and a
node that pairs again has ended its older stream.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.core.errors import BatonError, NoNode, Overloaded, PeerRefused
from baton.node.assembly import Node
from baton.node.describe import (
    describe_conversion,
    describe_measure,
    describe_mismatches,
    from_addresses,
    from_info,
    from_measure,
    to_addresses,
    to_mismatches,
    to_warm_ups,
)
from baton.node.link_floor import below_floor
from baton.node.peer_checks import check_addresses, check_info
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node.events import Event, HandOverReceived, PeerLost, QuietReceived
from decode_node.tag_numbers import SenderNumbers
from kvtransfer.plan import NodeDescription, PlanRefused, WirePlan, agree, links_between
from kvtransfer.records import LinkMeasure, PeerTraffic

log = logging.getLogger("baton")

Write = Callable[[pb.PairResponse], Awaitable[None]]

_HELLO_TIMEOUT_S = 10.0
_WARM_UP_TIMEOUT_S = 10.0
# Maximum number of past peers in the status.
_PAST_MAX = 32
# Handshakes under way; each may take the two timeouts above.
_HANDSHAKES_MAX = 64
# A new stream of a paired incarnation waits this long for the older stream to end.
_OLDER_END_S = 5.0
# A pair ends this long after its link has broken, so that messages already received are read first.
_BROKEN_END_S = 0.2
# If two peers have one incarnation, the status shows the one whose phase comes first here.
_PHASE_ORDER = (
    node_status_pb2.PEER_PHASE_READY,
    node_status_pb2.PEER_PHASE_CONNECTING,
    node_status_pb2.PEER_PHASE_REFUSED,
    node_status_pb2.PEER_PHASE_LOST,
)


@dataclass(eq=False)
class _Peer:
    """One prefill node's stream.

    Attributes:
        number: the sender number of its first rank; the other ranks' numbers follow.
        state: its entry in the status.
        outbox: the queued messages to it; None ends the stream.
        ended: set when its stream has ended.
        has_draft: it sends KV of layers that draft tokens, if this node has such layers.
    """

    number: int
    state: node_status_pb2.PeerState
    outbox: asyncio.Queue[pb.PairResponse | None] = field(default_factory=asyncio.Queue)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_draft: bool = True

    def note_traffic(self, traffic: Mapping[int, PeerTraffic]) -> None:
        if sent := traffic.get(self.number):
            self.state.bytes_total, self.state.segments_total = sent.bytes_total, sent.segments_total


class PrefillPeers:
    """All Pair streams of this node.

    Args:
        deliver: receives, in order, the peers' messages about leases, and their losses.
    """

    def __init__(self, node: Node, deliver: Callable[[Event], None]) -> None:
        self._node = node
        self._deliver = deliver
        self._sender_numbers = SenderNumbers()
        self._peers: dict[int, _Peer] = {}
        self._handshakes = 0
        self._past: dict[str, node_status_pb2.PeerState] = {}  # peers that are gone, by address, the latest last
        self._leaving: set[asyncio.Task[None]] = set()

    async def serve(self, incoming: AsyncIterator[pb.PairRequest], write: Write) -> None:
        """Runs one prefill node's stream.

        Raises:
            PeerRefused: the first message is no valid hello, this version does not know the peer's kind of cache, or
                the peer's incarnation has a ready pair whose stream does not end.
            Overloaded: too many handshakes are under way, or too many prefill nodes are paired.
            NoNode: the stream ends during the handshake.
            BatonError: the links could not be opened, connected or measured.
        """
        info = (await _hello(incoming)).info
        check_info(info, role=node_status_pb2.ROLE_PREFILL)
        state = _new_state(info)
        try:
            theirs = from_info(info)
            plan = agree(self._node.description, theirs)
            with self._handshake():
                await self._wait_for_older_pair(state)
            number = self._sender_numbers.draw(theirs.tensor_parallel_size)
        except PlanRefused as refused:
            self._keep_past(state)
            await write(self._refuse(state, to_mismatches(refused.mismatches)))
            return
        except BatonError as error:
            state.phase, state.detail = node_status_pb2.PEER_PHASE_LOST, str(error)
            self._keep_past(state)
            raise
        state.kv_converted = plan.conversion
        peer = self._peers[number] = _Peer(number, state)
        try:
            with self._handshake():
                ready = await self._connect(peer, theirs, plan, incoming, write)
            if ready:
                await self._exchange(peer, incoming, write)
        except TimeoutError:
            state.detail = f"no warm-up within {_WARM_UP_TIMEOUT_S:g} s"
        except BatonError as error:
            state.detail = str(error)
            raise
        finally:
            del self._peers[number]
            peer.ended.set()
            # In a separate task, because gRPC may cancel this handler once the stream's end has been read.
            leaving = asyncio.create_task(self._disconnect(peer), name=f"disconnect-{number}")
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
            await asyncio.shield(leaving)

    def send_lease_ended(self, lease: int) -> None:
        """Notifies every peer that this lease has ended. The one that fills it stops computing and sending."""
        for peer in self._peers.values():
            peer.outbox.put_nowait(pb.PairResponse(lease_ended=pb.LeaseEnded(lease=lease)))

    def states(self) -> list[node_status_pb2.PeerState]:
        """One entry for each incarnation, with its traffic so far; also for the latest peers that are gone."""
        traffic = self._node.transfer.counters().peers
        for peer in self._peers.values():
            peer.note_traffic(traffic)
        live = [peer.state for peer in self._peers.values()]
        addresses = {state.address for state in live}
        past = [state for address, state in self._past.items() if address not in addresses]
        # A hello that falsely claims the incarnation of a paired peer must not hide that peer.
        lines: dict[int, node_status_pb2.PeerState] = {}
        for state in sorted((*past, *live), key=lambda state: _PHASE_ORDER.index(state.phase)):
            lines.setdefault(state.incarnation, state)
        return list(lines.values())

    def close(self) -> None:
        """Ends every stream once everything queued has been written."""
        for peer in self._peers.values():
            peer.outbox.put_nowait(None)

    # ---- a stream, from its hello to its end

    @contextmanager
    def _handshake(self) -> Iterator[None]:
        """Counts a handshake.

        Raises:
            Overloaded: too many are under way.
        """
        if self._handshakes >= _HANDSHAKES_MAX:
            raise Overloaded(f"{self._handshakes} handshakes are under way", retry_after_s=1.0)
        self._handshakes += 1
        try:
            yield
        finally:
            self._handshakes -= 1

    async def _wait_for_older_pair(self, state: node_status_pb2.PeerState) -> None:
        """Waits until no other pair of the incarnation is ready.

        Raises:
            PeerRefused: one stays ready.
        """
        try:
            async with asyncio.timeout(_OLDER_END_S):
                while older := self._ready(state.incarnation):
                    await older.ended.wait()
        except TimeoutError:
            raise _paired_already(state) from None

    def _ready(self, incarnation: int) -> _Peer | None:
        """The ready pair with that incarnation."""
        states = ((peer, peer.state) for peer in self._peers.values())
        wanted = incarnation, node_status_pb2.PEER_PHASE_READY
        return next((peer for peer, state in states if (state.incarnation, state.phase) == wanted), None)

    async def _connect(
        self,
        peer: _Peer,
        theirs: NodeDescription,
        plan: WirePlan,
        incoming: AsyncIterator[pb.PairRequest],
        write: Write,
    ) -> bool:
        """Listens, connects, and measures the warm links. If they are too slow, refuses the peer and returns False.

        Raises:
            PeerRefused: another stream of the same incarnation became ready first.
            TimeoutError: the peer did not send its next message in time.
        """
        transfer = self._node.transfer
        flows = links_between(theirs, self._node.description)
        addresses = await transfer.listen(
            peer.number, flows, sends=False, on_failed=lambda error: self._link_failed(peer, error)
        )
        accepted = pb.PairAccepted(
            info=self._node.info,
            worker_addresses=from_addresses(addresses),
            sender_number=peer.number,
            wire_version=plan.wire_version,
            message_bytes=transfer.message_bytes,
            kv_scales=self._node.kv_scales,
        )
        await write(pb.PairResponse(accepted=accepted))
        worker_addresses = (await _next(incoming)).linked.worker_addresses
        check_addresses(worker_addresses, links=len(flows))
        await transfer.connect(
            peer.number,
            to_addresses(worker_addresses),
            incarnation=peer.state.incarnation,
            sealed=plan.sealed,
            has_draft=plan.has_draft,
        )
        peer.has_draft = plan.has_draft
        await write(pb.PairResponse(connected=pb.PairConnected()))
        measure = await self._measure(peer, incoming)
        if mismatch := below_floor(self._node, measure):
            await write(self._refuse(peer.state, to_mismatches((mismatch,))))
            return False
        if self._ready(peer.state.incarnation):
            raise _paired_already(peer.state)
        peer.state.phase = node_status_pb2.PEER_PHASE_READY
        links = describe_measure(measure) + describe_conversion(peer.state.kv_converted)
        log.info("paired with %s over %s", peer.state.name, links)
        if self._node.description.spec.draft is not None and not plan.has_draft:
            log.warning(
                "%s sends no KV of the layer that drafts tokens, so it guesses nothing for requests from there, and "
                "nothing of them is cached here; --speculation text on this node avoids that",
                peer.state.name,
            )
        await write(pb.PairResponse(ready=from_measure(measure)))
        return True

    async def _measure(self, peer: _Peer, incoming: AsyncIterator[pb.PairRequest]) -> LinkMeasure:
        async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
            message = await _receive(incoming)
            measure = await self._node.transfer.warmed_up(
                peer.number, to_warm_ups(message.warmed_up), timeout_s=_WARM_UP_TIMEOUT_S
            )
        peer.state.transport = measure.transport
        peer.state.gigabytes_per_s = measure.gigabytes_per_s
        peer.state.latency_s = measure.latency_s
        return measure

    async def _exchange(self, peer: _Peer, incoming: AsyncIterator[pb.PairRequest], write: Write) -> None:
        """Reads and writes until the peer closes the stream, it breaks, or `close` is called."""
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(self._read(peer, incoming), name=f"peer-{peer.number}")
            while (response := await peer.outbox.get()) is not None:
                await write(response)
            reader.cancel()

    async def _read(self, peer: _Peer, incoming: AsyncIterator[pb.PairRequest]) -> None:
        try:
            async for message in incoming:
                match message.WhichOneof("message"):
                    case "hand_over":
                        incarnation, has_draft = peer.state.incarnation, peer.has_draft
                        self._deliver(HandOverReceived(peer.number, message.hand_over, incarnation, has_draft))
                    case "quiet":
                        self._deliver(QuietReceived(peer.number, message.quiet, peer.state.incarnation))
                    case "refused":
                        mismatches = list(message.refused.mismatches)
                        peer.state.phase = node_status_pb2.PEER_PHASE_REFUSED
                        peer.state.mismatches.extend(mismatches)
                        log.warning("%s refused this node: %s", peer.state.name, describe_mismatches(mismatches))
                        return
        finally:
            peer.outbox.put_nowait(None)

    def _link_failed(self, peer: _Peer, error: BatonError) -> None:
        """Ends the stream, so that the prefill node makes the pair again."""
        peer.state.detail = peer.state.detail or str(error)
        asyncio.get_running_loop().call_later(_BROKEN_END_S, peer.outbox.put_nowait, None)

    async def _disconnect(self, peer: _Peer) -> None:
        state = peer.state
        if state.phase == node_status_pb2.PEER_PHASE_READY:
            log.info("lost %s: %s", state.name, state.detail or "its stream broke")
        if state.phase != node_status_pb2.PEER_PHASE_REFUSED:
            state.phase = node_status_pb2.PEER_PHASE_LOST
            state.detail = state.detail or "its stream broke"
        peer.note_traffic(self._node.transfer.counters().peers)  # `disconnect` drops the peer's counters
        self._keep_past(state)
        leases = await self._node.transfer.disconnect(peer.number)
        self._sender_numbers.give_back(peer.number)
        self._deliver(PeerLost(peer.number, state.name, leases))

    # ---- entries in the status

    def _keep_past(self, state: node_status_pb2.PeerState) -> None:
        """Keeps the entry of a peer that is gone or was refused, in place of an older one of its address."""
        self._past.pop(state.address, None)
        self._past[state.address] = state
        while len(self._past) > _PAST_MAX:
            del self._past[next(iter(self._past))]

    def _refuse(self, state: node_status_pb2.PeerState, mismatches: list[node_status_pb2.Mismatch]) -> pb.PairResponse:
        state.phase = node_status_pb2.PEER_PHASE_REFUSED
        state.mismatches.extend(mismatches)
        log.warning("refused %s: %s", state.name, describe_mismatches(mismatches))
        return pb.PairResponse(refused=pb.PairRefused(info=self._node.info, mismatches=mismatches))


def _new_state(info: node_status_pb2.NodeInfo) -> node_status_pb2.PeerState:
    return node_status_pb2.PeerState(
        name=info.name, address=info.address, incarnation=info.incarnation, phase=node_status_pb2.PEER_PHASE_CONNECTING
    )


def _paired_already(state: node_status_pb2.PeerState) -> PeerRefused:
    return PeerRefused(
        f"incarnation {state.incarnation:x} of {state.name} is paired with this node already",
        field="incarnation",
        value=f"{state.incarnation:x}",
        cure="end its other stream, or wait until it has ended",
    )


async def _next(incoming: AsyncIterator[pb.PairRequest]) -> pb.PairRequest:
    async with asyncio.timeout(_WARM_UP_TIMEOUT_S):
        return await _receive(incoming)


async def _receive(incoming: AsyncIterator[pb.PairRequest]) -> pb.PairRequest:
    """The peer's next message. Raises NoNode if the peer has ended the stream."""
    message = await anext(aiter(incoming), None)
    if message is None:
        raise NoNode("the prefill node ended the stream during the handshake", cure="see its log")
    return message


async def _hello(incoming: AsyncIterator[pb.PairRequest]) -> pb.PairHello:
    async with asyncio.timeout(_HELLO_TIMEOUT_S):
        message = await _receive(incoming)
    if message.WhichOneof("message") != "hello":
        raise PeerRefused("the first message of a pair is not a hello", cure="use the same version on both nodes")
    return message.hello
