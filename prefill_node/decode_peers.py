"""All decode nodes that this node knows.

Gateways request connections before traffic. A ticket for a node that is not connected opens the connection.
"""

import itertools
from collections.abc import Mapping

from baton.core.errors import Draining, NoNode, Overloaded, PeerRefused, UnknownLease
from baton.node.assembly import Node
from baton.node.describe import describe_mismatches
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.internal.v1 import lease_pb2
from baton.protos.v1 import node_status_pb2
from baton.security.roles import Role
from baton.security.tls import InternalTls
from kvtransfer.pair_ends import MOST_RANKS
from kvtransfer.records import PeerTraffic
from prefill_node.decode_peer import DecodePeer, Deliver

# Maximum number of lost and refused peers that are kept for the status.
_PAST_MAX = 32
_CONNECTING_MAX = 256


class DecodePeers:
    """The decode nodes that this node knows, by address."""

    def __init__(self, node: Node, *, timeout_s: float, deliver: Deliver) -> None:
        self._node = node
        self._timeout_s = timeout_s
        self._deliver = deliver
        tls = InternalTls.read(node.settings, Role.PREFILL)
        self._dial = None if tls is None else tls.to_role(Role.DECODE)
        self._numbers = itertools.count(MOST_RANKS, MOST_RANKS)
        self._by_address: dict[str, DecodePeer] = {}
        self._closed = False

    async def connect(self, address: str) -> node_status_pb2.PeerState:
        """Connects to a decode node unless it is connected; returns the peer's state after the handshake.

        Raises:
            Overloaded: too many connections are being made.
            Draining: the node opens no new connections.
        """
        return await self._peer(address).settled()

    async def for_ticket(self, ticket: lease_pb2.Ticket) -> DecodePeer:
        """The ready peer that a ticket names; connects to it if necessary.

        Raises:
            PeerRefused: the two nodes cannot work together.
            NoNode: the decode node cannot be reached.
            Overloaded: too many connections are being made.
            UnknownLease: the decode node has restarted since it issued the ticket.
        """
        peer = self._peer(ticket.decode_address)
        state = await peer.settled()
        if state.phase == node_status_pb2.PEER_PHASE_REFUSED:
            raise PeerRefused(
                f"{state.name} and this node cannot work together: {describe_mismatches(list(state.mismatches))}"
            )
        if not peer.ready:
            raise NoNode(f"{ticket.decode_node} cannot be reached: {state.detail}")
        if state.incarnation != ticket.lease.incarnation:
            raise UnknownLease(
                f"the ticket is from incarnation {ticket.lease.incarnation:x} of {state.name}, "
                f"which has incarnation {state.incarnation:x} now",
                cure="ask for a new ticket",
            )
        return peer

    def send(self, number: int, message: pb.PairRequest) -> None:
        """Queues a message for a peer; drops it when the peer is gone."""
        for peer in self._by_address.values():
            if peer.number == number:
                peer.send(message)

    def states(self, traffic: Mapping[int, PeerTraffic]) -> list[node_status_pb2.PeerState]:
        """The state of every peer, with what was sent to it so far."""
        for peer in self._by_address.values():
            if sent := traffic.get(peer.number):
                peer.state.bytes_total, peer.state.segments_total = sent.bytes_total, sent.segments_total
        return [peer.state for peer in self._by_address.values()]

    async def close(self) -> None:
        """Ends every peer; new ones are refused."""
        self._closed = True
        for peer in list(self._by_address.values()):
            await peer.close()

    def _peer(self, address: str) -> DecodePeer:
        peer = self._by_address.get(address)
        if peer is None or peer.over:
            if self._closed:
                raise Draining(f"{self._node.name} makes no new connections", cure="use another node")
            if sum(not (each.ready or each.over) for each in self._by_address.values()) >= _CONNECTING_MAX:
                raise Overloaded(f"{_CONNECTING_MAX} connections are being made", retry_after_s=1.0)
            number = next(self._numbers)
            peer = DecodePeer(
                self._node, address, number, timeout_s=self._timeout_s, deliver=self._deliver, dial=self._dial
            )
            self._keep(peer)
        return peer

    def _keep(self, peer: DecodePeer) -> None:
        """Replaces the peer at this address. The latest peers that are gone are kept for the status."""
        self._by_address.pop(peer.state.address, None)
        self._by_address[peer.state.address] = peer
        past = [key for key, old in self._by_address.items() if old.over]
        for key in past[:-_PAST_MAX]:
            del self._by_address[key]
