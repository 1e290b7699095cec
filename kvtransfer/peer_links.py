"""The links of one rank to its peers, on the transfer thread: opened, connected, measured and closed.

The sender, the receiver and the pulls decide what is sent over a link.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

from baton.core.errors import DataLoss, InternalError
from kvtransfer.entry_pulls import EntryPulls
from kvtransfer.ledger import Ledger, Peer
from kvtransfer.link import LinkSpeed
from kvtransfer.receiver import Receiver
from kvtransfer.records import LinkMeasure, PeerTraffic
from kvtransfer.sender import Sender
from kvtransfer.transports.transport import REACH_GPU_MEMORY, Transport


class PeerLinks:
    """All links of one rank. The thread calls `finish_disconnects` repeatedly.

    Args:
        ledger: has the connected peers, which are added and removed here.
        pulls: None: no entries are kept, so none are pulled.
        on_gpu: the cache is on a GPU.
        clock: as the receiver's.
    """

    def __init__(
        self,
        ledger: Ledger,
        transport: Transport,
        sender: Sender,
        receiver: Receiver,
        pulls: EntryPulls | None,
        *,
        on_gpu: bool,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._transport = transport
        self._sender = sender
        self._receiver = receiver
        self._pulls = pulls
        self._on_gpu = on_gpu
        self._clock = clock
        self._listening: set[int] = set()
        self._disconnecting: list[tuple[int, tuple[int, ...], Future[tuple[int, ...]]]] = []

    def listen(self, peer: int, future: "Future[bytes]") -> None:
        if peer in self._listening:
            raise InternalError(f"this transfer already listens to peer {peer}", field="peer", value=peer)
        self._listening.add(peer)
        future.set_result(self._transport.listen(peer))

    def connect(self, peer: Peer, address: bytes, future: "Future[None]") -> None:
        number = peer.number
        if number in self._ledger.peers or number not in self._listening:
            state = "is connected already" if number in self._ledger.peers else "has no listening end"
            raise InternalError(f"peer {number} {state}", field="peer", value=number)
        self._transport.connect(number, address)
        carrier = self._transport.carrier(number)
        through_host = self._on_gpu and carrier not in REACH_GPU_MEMORY
        self._ledger.peers[number] = replace(peer, carrier=carrier, through_host=through_host)
        self._ledger.traffic[number] = PeerTraffic()
        future.set_result(None)

    def check_connected(self, peer: int) -> None:
        """Raises DataLoss if the peer is not connected."""
        if peer not in self._ledger.peers:
            raise DataLoss("the peer is not connected", field="peer", value=peer)

    def expect_warm_up(self, peer: int, messages: int, num_bytes: int, future: "Future[LinkMeasure]") -> None:
        if peer not in self._ledger.peers:
            raise InternalError(f"peer {peer} is not connected", field="peer", value=peer)
        self._receiver.warm_ups.expect(peer, messages, num_bytes, self._ledger.peers[peer].transport, future)

    def measure_latency(self, peer: int, future: "Future[float]") -> None:
        self.check_connected(peer)
        self._receiver.round_trips.measure(peer, self._clock(), future)

    def use_link(self, peer: int, link: LinkSpeed, future: "Future[None]") -> None:
        self.check_connected(peer)
        self._ledger.peers[peer] = replace(self._ledger.peers[peer], link=link)
        future.set_result(None)

    def disconnect(self, peer: int, future: "Future[tuple[int, ...]]") -> None:
        """Closes the link. The future's result is the peer's open leases, once nothing of the peer is in flight."""
        if peer not in self._listening:
            future.set_result(())
            return
        self._listening.remove(peer)
        known = self._ledger.peers.pop(peer, None)
        self._ledger.traffic.pop(peer, None)
        self._sender.lost(peer)
        if self._pulls is not None:
            self._pulls.lost(peer)
        leases = self._receiver.lost(peer, group=None if known is None else known.group)
        self._transport.disconnect(peer)
        self._disconnecting.append((peer, leases, future))

    def disconnect_all(self) -> None:
        for peer in list(self._listening):
            self.disconnect(peer, Future())

    def finish_disconnects(self) -> None:
        """Completes the futures of disconnected peers that have nothing in flight any more."""
        if not self._disconnecting:
            return
        waiting = []
        for peer, leases, future in self._disconnecting:
            if self._holds(peer):
                waiting.append((peer, leases, future))
            else:
                future.set_result(leases)
        self._disconnecting = waiting

    def _holds(self, peer: int) -> bool:
        """Whether anything of that peer is in flight."""
        pulled = self._pulls is not None and self._pulls.holds(peer)
        return pulled or self._sender.holds(peer) or self._receiver.holds(peer)
