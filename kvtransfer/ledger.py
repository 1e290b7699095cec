"""The transfer thread's connected peers and counters."""

from collections import Counter
from dataclasses import dataclass, field

from baton.kvcache.wire.conversion import Converter
from kvtransfer.link import LinkSpeed, choose_payload_bytes
from kvtransfer.records import PeerTraffic, TransferCounters
from kvtransfer.refusals import SegmentRefusal

# Numbers of links for pulls begin here. Those of pairs, which carry leases' segments, are all below.
FIRST_PULL_LINK = 1 << 40


def is_pull_link(peer: int) -> bool:
    """Whether a peer's number names a link for pulls."""
    return peer >= FIRST_PULL_LINK


@dataclass(frozen=True)
class Peer:
    """A connected peer, for the transfer thread.

    Attributes:
        payload_limit: largest payload of one message to it.
        carrier: what moves the bytes; empty until it is connected.
        through_host: the cache is on a GPU, and this peer's KV is staged in host memory.
        link: as measured when the pair was made; None until then.
        group: shared by the ranks of one node; None: the peer is alone.
        converter: applied to KV sent to this peer; None: KV keeps its dtype.
        incarnation: of its node; leases may be bound to it.
        sealed: segments between the two have seals.
        has_draft: it has KV of layers that draft tokens, if this node has.
    """

    number: int
    payload_limit: int
    carrier: str = ""
    through_host: bool = False
    link: LinkSpeed | None = None
    group: int | None = None
    converter: Converter | None = None
    incarnation: int = 0
    sealed: bool = False
    has_draft: bool = True

    def payload_bytes_for(self, job_bytes: int, *, handling_s: float) -> int:
        """Largest payload of one message of a job of that size."""
        if self.link is None:
            return self.payload_limit
        return choose_payload_bytes(self.link, job_bytes=job_bytes, limit=self.payload_limit, handling_s=handling_s)

    @property
    def transport(self) -> str:
        """The carrier of the bytes, for operators."""
        return f"{self.carrier} through host memory" if self.through_host else self.carrier


@dataclass
class Ledger:
    """The thread's counters and connected peers. Only the thread writes them; any thread may call `snapshot`."""

    peers: dict[int, Peer] = field(default_factory=dict)
    refusals: Counter[SegmentRefusal] = field(default_factory=Counter)
    traffic: dict[int, PeerTraffic] = field(default_factory=dict)
    converted: int = 0
    bytes_total: int = 0
    segments_total: int = 0

    def moved(self, peer: int, num_bytes: int) -> None:
        self.bytes_total += num_bytes
        self.segments_total += 1
        before = self.traffic.get(peer)
        if before is not None:
            self.traffic[peer] = PeerTraffic(before.bytes_total + num_bytes, before.segments_total + 1)
            self.converted += self.peers[peer].converter is not None

    def fair_share(self, slots: int) -> int:
        """Maximum number of staging slots for one peer, so that a stalled peer leaves room for the others."""
        pairs = sum(not is_pull_link(peer) for peer in self.peers)  # pulls need no slots
        return slots if pairs <= 1 else max(1, slots // 2)

    def snapshot(self) -> TransferCounters:
        return TransferCounters(
            self.refusals.copy(), self.traffic.copy(), self.converted, self.bytes_total, self.segments_total
        )
