"""The prefill nodes that may send KV here: which of them may be paired, and what the status shows of them, also when
they are gone.

Each incarnation has one ready pair, and an older pair wins over a newer one: anybody may claim an incarnation, and a
node that pairs again has ended its older stream.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from baton.core.errors import BatonError, Overloaded, PeerRefused
from baton.node.assembly import Node
from baton.node.describe import describe_mismatches, from_info, to_mismatches
from baton.node.link_floor import below_floor
from baton.node.peer_checks import check_info
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import node_status_pb2
from decode_node.events import PeerLost
from decode_node.prefill_peer import Deliver, Incoming, PrefillPeer, Write, receive_hello
from decode_node.tag_numbers import SenderNumbers
from kvtransfer.plan import PlanRefused, agree
from kvtransfer.records import PeerTraffic

log = logging.getLogger("baton")

# Maximum number of past peers in the status.
_PAST_MAX = 32
# Handshakes under way; each may take the timeouts of `decode_node.prefill_peer`.
_HANDSHAKES_MAX = 64
# A new stream of a paired incarnation waits this long for the older stream to end.
_OLDER_END_S = 5.0
# If two peers have one incarnation, the status shows the one whose phase comes first here.
_PHASE_ORDER = (
    node_status_pb2.PEER_PHASE_READY,
    node_status_pb2.PEER_PHASE_CONNECTING,
    node_status_pb2.PEER_PHASE_REFUSED,
    node_status_pb2.PEER_PHASE_LOST,
)


class PrefillPeers:
    """All Pair streams of this node.

    Args:
        deliver: receives, in order, the peers' messages about leases, and their losses.
    """

    def __init__(self, node: Node, deliver: Deliver) -> None:
        self._node = node
        self._deliver = deliver
        self._sender_numbers = SenderNumbers()
        self._peers: dict[int, PrefillPeer] = {}
        self._handshakes = 0
        self._past: dict[str, node_status_pb2.PeerState] = {}  # peers that are gone, by address, the latest last
        self._leaving: set[asyncio.Task[None]] = set()

    async def serve(self, incoming: Incoming, write: Write) -> None:
        """Runs one prefill node's stream.

        Raises:
            PeerRefused: the first message is not a valid hello, this version does not know the peer's kind of cache, or
                the peer's incarnation has a ready pair whose stream does not end.
            Overloaded: too many handshakes are under way, or too many prefill nodes are paired.
            NoNode: the stream ends during the handshake.
            BatonError: the links could not be opened, connected or measured.
        """
        info = (await receive_hello(incoming)).info
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
        peer = self._peers[number] = PrefillPeer(self._node, number, state, incoming, write, deliver=self._deliver)
        try:
            with self._handshake():
                measure = await peer.connect(theirs, plan)
                if mismatch := below_floor(self._node, measure):
                    await write(self._refuse(state, to_mismatches((mismatch,))))
                    return
                if self._ready(state.incarnation):
                    raise _paired_already(state)
                await peer.make_ready(measure)
            await peer.exchange()
        except TimeoutError as error:
            state.detail = str(error)
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
            peer.send_lease_ended(lease)

    def states(self, traffic: Mapping[int, PeerTraffic]) -> list[node_status_pb2.PeerState]:
        """One entry for each incarnation, with its traffic so far; also for the latest peers that are gone."""
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
            peer.end()

    # ---- which peers may be paired

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

    def _ready(self, incarnation: int) -> PrefillPeer | None:
        """The ready pair with that incarnation."""
        peers = self._peers.values()
        return next((peer for peer in peers if peer.ready and peer.state.incarnation == incarnation), None)

    def _refuse(self, state: node_status_pb2.PeerState, mismatches: list[node_status_pb2.Mismatch]) -> pb.PairResponse:
        state.phase = node_status_pb2.PEER_PHASE_REFUSED
        state.mismatches.extend(mismatches)
        log.warning("refused %s: %s", state.name, describe_mismatches(mismatches))
        return pb.PairResponse(refused=pb.PairRefused(info=self._node.info, mismatches=mismatches))

    # ---- peers that are gone

    async def _disconnect(self, peer: PrefillPeer) -> None:
        self._keep_past(peer.state)
        leases = await peer.disconnect()
        self._sender_numbers.give_back(peer.number)
        self._deliver(PeerLost(peer.number, peer.state.name, leases))

    def _keep_past(self, state: node_status_pb2.PeerState) -> None:
        """Keeps the entry of a peer that is gone or was refused, in place of an older one of its address."""
        self._past.pop(state.address, None)
        self._past[state.address] = state
        while len(self._past) > _PAST_MAX:
            del self._past[next(iter(self._past))]


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
